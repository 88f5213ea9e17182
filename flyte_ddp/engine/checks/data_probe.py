"""Checks of data before training: all ranks must have the same samples, and a Dataset the same each time."""

import hashlib
import select
import socket
import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from flyte_ddp.engine.batches.lengths import get_lengths
from flyte_ddp.engine.batches.loading import Streamed, read_samples
from flyte_ddp.engine.batches.splits import Split, spread
from flyte_ddp.engine.checks.held_generators import SEED, find_held_generators
from flyte_ddp.engine.checks.trials import host_state, is_same
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.collectives import all_reduce_flags, broadcast_value
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

SAMPLES = 4  # how many samples are read twice
COMPARED = 16  # how many samples the ranks compare
CPU = torch.device("cpu")
AUGMENT = "draw in augment() from its argument random"
MOST_TURNS = 4096  # take about 0.1 s
TURN_SECONDS = 5.0  # how long a worker waits, because it may need a lock that the other one holds
GO, END = b"g", b"e"


class Fault(Enum):
    """The reasons why samples are not the same, as messages. If several are true of a split, the first is reported."""

    CHANGING = "its {dataset} gives another sample each time: {remedy}"
    KEPT = (
        "its {dataset} gives other samples after others were read: keep nothing that was drawn from one sample to the "
        "next; draw it in each __getitem__, or in __init__ from a generator with a seed, such as "
        "numpy.random.default_rng(0)"
    )
    SHARED = (
        "its {dataset} gives other samples where two loader workers read at once, as they share what it has opened: "
        "open it at first use in __getitem__, or set loader_workers to 0"
    )
    UNEQUAL = (
        "gives each rank other samples: sort what it lists, and to shuffle or split, draw from a generator with a "
        "seed, such as numpy.random.default_rng(0)"
    )


def find_unequal_data(owner: str, splits: dict[str, Split]) -> list[str]:
    """Return a sentence for each reason why samples differ between ranks, or between two readings; a collective.

    A few samples of each split are read. All ranks get the same list, which is empty if no sample differs. A sentence
    names all splits with that reason. If a split has several reasons, only the first in the enum Fault counts.

    Args:
        owner: the place in the user's code that the samples come from. Each sentence begins with it.
        splits: the samples, by the name of the split.
    """
    device = next(iter(splits.values())).device
    digests = {}
    faults = dict[str, set[Fault | None]]()
    remedies = {}
    for name, split in splits.items():
        chosen = spread(split, min(COMPARED, len(split)))
        fault, remedies[name] = _find_fault(split, chosen[:SAMPLES])
        faults[name] = {fault}
        (tree,) = split.fetch([chosen])
        digests[name] = len(split), [compute_sum(leaf).item() for leaf in pytree.tree_leaves(tree)]
    first_digests, first_remedies = broadcast_value((digests, remedies))
    for name in splits:
        if digests[name] != first_digests[name]:
            faults[name].add(Fault.UNEQUAL)
    found = {fault: all_reduce_flags([fault in faults[name] for name in splits], device) for fault in Fault}
    reasons: dict[str, list[str]] = {}  # the splits that each reason is true of
    for number, (name, split) in enumerate(splits.items()):
        fault = next((fault for fault in Fault if found[fault][number]), None)
        if fault:
            dataset = getattr(split, "dataset", None)
            # The message has rank 0's remedy, but rank 0's samples may have been the same
            remedy = first_remedies[name] or _remedy(dataset, "")
            reason = fault.value.format(dataset=type(dataset).__name__, remedy=remedy)
            reasons.setdefault(reason, []).append(f'split "{name}"')
    return [f"{owner}, {' and '.join(where)}: {reason}" for reason, where in reasons.items()]


def refuse_coupled_reading(recipe: Recipe, split: Split) -> None:
    """Raise InputError if what a Dataset's read_batch returns for a sample depends on the other samples of the call.

    With virtual ranks, a rank reads the samples of several parts in one call, so such a dependence would change
    results. A few samples are read together and alone, and compared. Nothing is checked if the split has no Dataset
    with read_batch, or if the recipe has lengths(split).

    Args:
        recipe: the recipe, for the message.
        split: the split whose Dataset is checked.
    """
    dataset = getattr(split, "dataset", None)
    if not hasattr(type(dataset), "read_batch") or get_lengths(split):
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


def _find_fault(split: Split, chosen: Tensor) -> tuple[Fault | None, str]:
    """Read samples twice, then in another order, and return why the readings differ, and a remedy.

    If the split has loader workers, two of them read the other order at once. Only a Dataset is read; for data in
    memory or in blocks, the result is None and "".

    Args:
        split: the split.
        chosen: (n,) int64, the indices of the samples to read, in increasing order.

    Returns:
        The reason: Fault.CHANGING if the second reading differs, Fault.KEPT if a sample depends on those that were read
        before it, Fault.SHARED if only two workers at once read something else, or None. And a text, the remedy for
        Fault.CHANGING; otherwise "".
    """
    if not isinstance(split, Streamed):
        return None, ""
    dataset = split.dataset
    # In a loader worker, as in training, because a file that the Dataset opens at first use must not be shared
    read_twice = partial(_read_twice, split.is_padded)
    twice = Streamed(_ReadBy(read_twice, dataset), CPU, min(1, split.workers))
    differs, call, expected = next(iter(twice.fetch([chosen])))
    if differs:
        return Fault.CHANGING, _remedy(dataset, bytes(call.numpy()).decode())
    if split.workers:
        ends = socket.socketpair()
        try:
            at_once = Streamed(_ReadBy(partial(_read_in_turns, ends), dataset), CPU, workers=2)
            read = [*at_once.fetch([chosen.roll(1), chosen.roll(2)])]
        finally:
            for end in ends:
                end.close()
        if all(torch.equal(digests, expected) for digests in read):
            return None, ""
    alone = Streamed(_ReadBy(_sample_digests, dataset), CPU, min(1, split.workers))
    (digests,) = alone.fetch([chosen.roll(1)])
    if not torch.equal(digests, expected):
        return Fault.KEPT, ""
    return Fault.SHARED if split.workers else None, ""


def _remedy(dataset: Any, call: str) -> str:
    """Return the advice for a Dataset that gives other samples each time.

    If the Dataset has read_batch, the advice is not to draw there, whatever `call` is.

    Args:
        dataset: the Dataset.
        call: the code that seeds the Dataset's own generator, which the advice shows; "" if no such generator is found.
    """
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


class _ReadBy:
    """A Dataset whose batches are what a function returns for another Dataset and the indices of some samples."""

    def __init__(self, read: Callable[[Any, np.ndarray], Any], dataset: Any):
        self.read = read
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def read_batch(self, indices: np.ndarray) -> Any:
        return self.read(self.dataset, indices)


def _sample_digests(dataset: Any, indices: np.ndarray) -> np.ndarray:
    """Read samples one by one, in the order of `indices`, and return a digest of each.

    The random generators are seeded before each sample, as in a training, and alike for any order of `indices`.

    Args:
        dataset: the Dataset.
        indices: (n,) int64, the indices of the samples.

    Returns:
        (n,) int64, the digests in the order of increasing indices.
    """
    digests = np.zeros(len(indices), np.int64)
    for row, place in enumerate(indices.argsort().argsort()):
        leaves = pytree.tree_leaves(read_samples(dataset, indices[row : row + 1], origin=(0, int(place))))
        content = [(array.dtype.str, array.shape, array.tobytes()) for array in map(np.asarray, leaves)]
        digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
        digests[place] = int.from_bytes(digest, "little", signed=True)
    return digests


def _read_in_turns(ends: tuple[socket.socket, ...], dataset: Any, indices: np.ndarray) -> np.ndarray:
    """Read samples in one of two loader workers that take turns, and return digests of the samples.

    After each call of a function in C, such as seek or read, this worker waits until the other worker has made one. So
    a file offset that both workers share leads to wrong reads for certain, not rarely. The turns end after MOST_TURNS
    calls, when the other worker has finished, or if it does not answer for TURN_SECONDS; then this worker reads on
    alone. This function replaces a profiler that sys.setprofile has set.

    Args:
        ends: the two ends of a socket, one for each worker.
        dataset: the Dataset.
        indices: (n,) int64, the indices of this worker's samples.

    Returns:
        (n,) int64, the digests in the order of increasing indices. All are 0 if reading raises an error.
    """
    worker = get_worker_info()
    assert worker
    end = ends[worker.id]
    turns = count(1)
    answers = select.poll()  # select.select() fails with descriptors above 1023, which a Dataset of many files has
    answers.register(end, select.POLLIN)

    def called(_frame: object, event: str, _function: object) -> None:
        if event != "c_return":
            return
        end.send(GO)
        is_answered = bool(answers.poll(TURN_SECONDS * 1000))
        if not is_answered or end.recv(1) == END or next(turns) == MOST_TURNS:
            sys.setprofile(None)
            end.send(END)

    sys.setprofile(called)
    try:
        return _sample_digests(dataset, indices)
    except Exception:  # a shared offset leads to the wrong place; a worker alone has read these samples before
        return np.zeros(len(indices), np.int64)
    finally:
        sys.setprofile(None)
        end.send(END)


def _read_twice(is_padded: bool, dataset: Any, indices: np.ndarray) -> tuple[np.ndarray, ...]:
    """Read samples twice as in an evaluation, and return whether the readings differ, and digests of the samples.

    The readings differ if a sample differs. They also differ if random generators, the global ones or those in the
    Dataset's attributes, are in another state after the second reading than after the first: a random flip, for
    example, may leave these few samples as they are.

    Args:
        is_padded: whether samples of different lengths are padded.
        dataset: the Dataset, whose own errors are raised unchanged.
        indices: (n,) int64, the indices of the samples.

    Returns:
        Three arrays:

        - (1,) bool: whether the readings differ.
        - (k,) uint8: a text in UTF-8, the code that would seed the first generator in the Dataset's attributes that has
        changed, such as self.rng.manual_seed(...); empty if none has.
        - (n,) int64: a digest of each sample, in the order of increasing indices, from a third reading, as in a
        training.
    """
    readings, held = [], []
    for _ in range(2):
        leaves = map(np.asarray, pytree.tree_leaves(read_samples(dataset, indices, is_padded)))
        content = [(leaf.shape, leaf.tobytes()) for leaf in leaves]
        readings.append((content, host_state(), torch.get_rng_state().numpy().tobytes()))
        held.append(find_held_generators(dataset))
    drawn = [call for call, state in held[1].items() if held[0].get(call) != state]
    call = "".join(drawn[:1]).encode()
    differs = readings[0] != readings[1] or bool(drawn)
    return np.array([differs]), np.array([*call], np.uint8), _sample_digests(dataset, indices)
