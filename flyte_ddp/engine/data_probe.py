"""Checks a recipe's data before training: do all ranks have the same samples, and are they the same each time?"""

import hashlib
from typing import Any, List, Tuple

import numpy as np
import torch
from torch import distributed

from flyte_ddp.engine.batches import Split
from flyte_ddp.engine.draws import DRAWN, host_state
from flyte_ddp.engine.loading import Streamed, read_samples
from flyte_ddp.engine.measures import place
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.recipe import Recipe

SAMPLES = 4  # how many samples are read twice
COMPARED = 16  # how many samples the ranks compare


def unequal_data(recipe: Recipe, split: Split) -> str:
    """What is wrong if the ranks' samples differ, or a Dataset returns other samples each time, else ""; a collective,
    which returns the same on all ranks."""
    chosen = torch.linspace(0, len(split) - 1, min(COMPARED, len(split))).long()
    is_unsteady = False
    if isinstance(split, Streamed):
        # In a loader worker, as in training, because a file that the Dataset opens at first use must not be shared
        twice = Streamed(_Twice(split.dataset), torch.device("cpu"), min(1, split.workers))
        is_unsteady = bool(next(iter(twice.fetch(chosen[:SAMPLES], [slice(0, SAMPLES)])))[0])
    (tree,) = split.fetch(chosen, [slice(0, len(chosen))])
    digest = hashlib.sha256(b"".join(leaf.cpu().numpy().tobytes() for leaf in pytree.tree_leaves(tree))).hexdigest()
    everyones: List[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, (is_unsteady, len(split), digest))
    where = place(recipe, "data")
    if any(unsteady for unsteady, _, _ in everyones):
        name = type(split.dataset).__name__  # type: ignore[attr-defined]
        return f"{where}: its {name} gives another sample each time: let {DRAWN}"
    if len(set(everyones)) > 1:
        return (
            f"{where}: gives each rank other samples: sort what it lists, and to shuffle or split, draw from a "
            "generator with a seed, such as numpy.random.default_rng(0)"
        )
    return ""


class _Twice:
    """A Dataset that reads another one twice and returns whether the samples differ.

    It compares the states of the random number generators, too: flipping half of the images may leave these few as they
    are. A Dataset that sets a seed for each sample ends up in the same state both times.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def read_batch(self, indices: np.ndarray) -> Tuple[np.ndarray]:
        found = []
        for _ in range(2):
            leaves = [np.asarray(leaf) for leaf in pytree.tree_leaves(read_samples(self.dataset, indices))]
            state = host_state(), torch.get_rng_state().numpy().tobytes()
            found.append(([(leaf.shape, leaf.tobytes()) for leaf in leaves], state))
        return (np.array([found[0] != found[1]]),)
