"""A check of a recipe's data before training: all ranks must have the same samples, and the same each time."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

from flyte_ddp.engine.batches.lengths import lengths_of
from flyte_ddp.engine.batches.loading import Streamed, read_samples
from flyte_ddp.engine.batches.splits import Split, spread
from flyte_ddp.engine.checks.held_generators import SEED, generator_states
from flyte_ddp.engine.checks.trials import is_same
from flyte_ddp.engine.checks.worker_probe import Fault, fault_of_workers, sample_digests
from flyte_ddp.engine.digest import sum_of
from flyte_ddp.engine.measures import code_location
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

SAMPLES = 4  # how many samples are read twice
COMPARED = 16  # how many samples the ranks compare
AUGMENT = "draw in augment() from its argument random"


def unequal_data(owner: str, splits: dict[str, Split]) -> list[str]:
    """Return what is wrong if the ranks' samples differ, or a Dataset returns other samples each time.

    A collective, which returns the same on all ranks. owner: the code that the samples are from.
    """
    device = next(iter(splits.values())).device
    digests, unsteady, faults = {}, {}, dict[str, Fault]()
    for name, split in splits.items():
        chosen = spread(split, min(COMPARED, len(split)))
        if isinstance(split, Streamed):
            # In a loader worker, as in training, because a file that the Dataset opens at first use must not be shared
            twice = Streamed(_Twice(split.dataset, split.is_padded), torch.device("cpu"), min(1, split.workers))
            differs, call, expected = next(iter(twice.fetch([chosen[:SAMPLES]])))
            if differs:
                unsteady[name] = _remedy(split.dataset, bytes(call.numpy()).decode())
            elif split.workers and (fault := fault_of_workers(split, chosen[:SAMPLES], expected.numpy())):
                faults[name] = fault
        (tree,) = split.fetch([chosen])
        digests[name] = len(split), [sum_of(leaf).item() for leaf in pytree.tree_leaves(tree)]
    first, remedies = of_first_rank((digests, unsteady))
    changing = on_any_rank([name in unsteady for name in splits], device)
    others = on_any_rank([digests[name] != first[name] for name in splits], device)
    found = {fault: on_any_rank([faults.get(name) is fault for name in splits], device) for fault in Fault}
    reasons: dict[str, list[str]] = {}  # the splits that each is true of
    for number, (name, split) in enumerate(splits.items()):
        dataset = getattr(split, "dataset", None)
        fault = next((fault for fault in Fault if found[fault][number]), None)
        if changing[number]:
            remedy = remedies.get(name) or _remedy(dataset, "")
            reason = f"its {type(dataset).__name__} gives another sample each time: {remedy}"
        elif fault:
            reason = f"its {type(dataset).__name__} {fault.value}"
        elif others[number]:
            reason = (
                "gives each rank other samples: sort what it lists, and to shuffle or split, draw from a generator "
                "with a seed, such as numpy.random.default_rng(0)"
            )
        else:
            continue
        reasons.setdefault(reason, []).append(f'split "{name}"')
    return [f"{owner}, {' and '.join(where)}: {reason}" for reason, where in reasons.items()]


def refuse_coupled_reading(recipe: Recipe, split: Split) -> None:
    """Refuse a read_batch that returns a sample otherwise beside others: a rank reads all of its parts at once.

    With lengths(split), samples are padded to the longest of the global batch, whatever read_batch has padded.
    """
    dataset = getattr(split, "dataset", None)
    if not hasattr(dataset, "read_batch") or lengths_of(split):
        return
    chosen = spread(split, min(SAMPLES, len(split)))
    together, *alone = map(pytree.tree_leaves, split.fetch([chosen, *chosen.split(1)]))
    for leaf, *rows in zip(together, *alone, strict=True):
        if any(not is_same(row[0], one) for row, one in zip(rows, leaf, strict=True)):
            raise InputError(
                f"{code_location(recipe, 'data')}: with virtual_ranks {type(dataset).__name__}.read_batch must return "
                "a sample as it is, whatever others it reads: mix samples in augment(), and to pad them, let the "
                "recipe's lengths(split) return their lengths"
            )


def of_first_rank(value: Any) -> Any:
    """Return what rank 0 has given; a collective, which costs a rank the same among any number of them."""
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


def on_any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Return, for each flag, whether it is set on any rank; a collective."""
    counts = torch.tensor(flags, dtype=torch.float32, device=device)
    distributed.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]


def _remedy(dataset: Any, call: str) -> str:
    """Say what to write instead. call: what seeds the generator that the dataset draws from; empty if none is found."""
    if hasattr(dataset, "read_batch"):
        return (
            "read_batch must not draw, since ranks read other samples together: draw in a __getitem__ instead, or "
            f"{AUGMENT}"
        )
    if call:
        return (
            "a generator of its own goes on from sample to sample, so let __getitem__ begin with "
            f"{call}, or draw from numpy.random, random or torch.rand, which begin anew with each sample"
        )
    return (
        "let __getitem__ draw from numpy.random, random or torch.rand alone, which begin anew with each sample, give "
        f"{SEED} to what else takes a seed, and keep nothing from one sample to the next; or {AUGMENT}"
    )


def host_state() -> Any:
    """Return the state of NumPy's and Python's random number generators, which changes when something draws."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), keys.tobytes(), position  # type: ignore[union-attr]


class _Twice:
    """A Dataset that reads another one twice and returns whether the samples differ, in UTF-8 what seeds the generator
    of its own that it draws from, if any is found, and what `sample_digests` returns after that.

    It compares the states of the random number generators, too: flipping half of the images may leave these few as they
    are. A Dataset that sets a seed for each sample ends up in the same state both times.
    """

    def __init__(self, dataset: Any, is_padded: bool):
        self.dataset, self.is_padded = dataset, is_padded

    def __len__(self) -> int:
        return len(self.dataset)

    def read_batch(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        readings, held = [], []
        for _ in range(2):
            leaves = [
                np.asarray(leaf) for leaf in pytree.tree_leaves(read_samples(self.dataset, indices, self.is_padded))
            ]
            state = host_state(), torch.get_rng_state().numpy().tobytes()
            readings.append(([(leaf.shape, leaf.tobytes()) for leaf in leaves], state))
            held.append(generator_states(self.dataset))
        drawn = [call for call, state in held[1].items() if held[0].get(call) != state]
        call = "".join(drawn[:1]).encode()
        differs = readings[0] != readings[1] or bool(drawn)
        return np.array([differs]), np.array([*call], np.uint8), sample_digests(self.dataset, indices)
