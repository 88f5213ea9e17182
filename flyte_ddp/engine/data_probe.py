"""A look at a recipe's data before its training: has each rank the same samples, and the same each time?"""

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

SAMPLES = 4  # that are read twice
COMPARED = 16  # samples by which the ranks compare their data


def unequal_data(recipe: Recipe, split: Split) -> str:
    """Whether the ranks have other samples under the same numbers, or a Dataset gives others each time; a collective,
    which returns the same on all ranks."""
    chosen = torch.linspace(0, len(split) - 1, min(COMPARED, len(split))).long()
    is_unsteady = False
    if isinstance(split, Streamed):
        # In a loader worker, as in the training: a file that the Dataset opens at first use must not be shared with it
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
    """A Dataset whose only answer is whether another one gives other samples the second time.

    It compares the states of the random numbers, too: a flip of half the images may leave these few as they are. A
    Dataset that sets a seed for each sample ends both times in the same state.
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
