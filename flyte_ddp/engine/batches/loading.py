"""Samples that are not in memory, which the rank's own worker processes read ahead from a Dataset."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flyte_ddp.engine.batches.arrays import KINDS, replace_mappings, to_tensor
from flyte_ddp.engine.batches.inherited_files import reopen_in_forks
from flyte_ddp.engine.batches.lengths import Lengths
from flyte_ddp.engine.batches.sample_seeds import (
    NOWHERE,
    Origin,
    generators_restored,
    sample_keys,
    seed_generators,
)
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import DataError

# A forked worker has its first batch after 0.04 s. A fork must not use CUDA, and workers do not. A forkserver would
# import torch once more for each rank (6 s on two busy cores). macOS's libraries don't survive a fork.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
# A fork must not collect its parent's garbage. The store of a process group that has failed is such garbage: its end
# waits for a thread, which a fork lacks, and is a segmentation fault.
os.register_at_fork(after_in_child=gc.freeze)
reopen_in_forks()

T = TypeVar("T")


class Streamed:
    """A split of the samples of a map-style Dataset, of which a few batches at a time are in memory.

    If the dataset has a method read_batch(indices (n,) int64 array), the method returns a whole batch, a tree of arrays
    (n, ...). It must not draw random numbers, which would depend on which samples are read together.

    Args:
        dataset: the Dataset.
        device: the rank's device, which gets the tensors.
        workers: the number of processes that read ahead; 0 reads in this one.
        pin_memory: whether batches for a GPU are copied to page-locked memory first.
    """

    remedy = "look at what its host reads from, or raise loader_workers"

    def __init__(self, dataset: Any, device: torch.device, workers: int = 0, pin_memory: bool = False):
        self.dataset = dataset
        self.device = device
        self.workers = workers
        self.pin_memory = pin_memory
        self.lengths: Lengths | None = None
        self.is_padded = False

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, parts: Iterable[Tensor], origins: Iterable[Origin] = NOWHERE) -> Iterator[Any]:
        """Yield each part's samples on the device, as a tree of tensors (n, ...), while workers read the next parts.

        The workers start when the first part is asked for, and end after the last part or when this generator is
        closed. They take several items of `parts` and `origins` in advance. The shorter iterable ends the reading.

        Args:
            parts: for each part its sample indices, (n,) int64 on the CPU.
            origins: for each part the epoch's key and the position of its first sample, which seed the Dataset's random
                numbers. By default every part belongs to an evaluation.

        Raises:
            DataError: A sample cannot be read, or does not fit the others.
        """
        workers = self.workers
        indices: Any = ((part.numpy(), origin) for part, origin in zip(parts, origins, strict=False))
        loader = DataLoader(
            _Reader(self.dataset, self.is_padded),
            batch_sampler=indices,
            num_workers=workers,
            multiprocessing_context=START_METHOD if workers else None,
            worker_init_fn=_begin if workers else None,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory and self.device.type == "cuda",
            generator=torch.Generator(),  # DataLoader must not draw the workers' seed from the rank's own generator
        )
        # After a SIGTERM to the whole process group the rank finishes its step, and needs the workers for that
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            batches = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for read in batches:
            if read.problem:
                raise DataError(read.problem)
            yield pytree.tree_map(lambda leaf: leaf.to(self.device, non_blocking=True), read.tensors())


def prefetch(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield the items of an iterator, which a thread computes in advance.

    The thread starts when the first item is asked for. If computing an item raises an error, the consumer gets the
    error in the item's place. When this generator is closed, the thread may still compute up to `count` items.

    Args:
        items: the iterator. Only the thread uses it.
        count: the most items to hold at a time, at least 1. The item that the consumer works on is one of them, so with
            1 the thread waits meanwhile.
    """
    asked: SimpleQueue[bool] = SimpleQueue()
    made: SimpleQueue[Future[T]] = SimpleQueue()

    def make() -> None:
        while asked.get():
            item: Future[T] = Future()
            try:
                item.set_result(next(items))
            except BaseException as error:
                item.set_exception(error)
            made.put(item)

    threading.Thread(target=make, daemon=True).start()
    for _ in range(count):
        asked.put(True)
    try:
        while True:
            try:
                item = made.get().result()
            except StopIteration:
                return
            yield item
            asked.put(True)
    finally:
        asked.put(False)


class _Read:
    """The arrays (n, ...) of a batch on their way to the rank, or what is wrong with one of its samples.

    Arrays are sent through a pipe. Tensors would be sent in shared memory, of which containers have little, and whose
    bookkeeping fragments the heap: 0.5 GB more after 200 batches of 128 x 3 x 64 x 64.
    """

    def __init__(self, tree: Any, problem: str = ""):
        self.tree = tree
        self.problem = problem

    def pin_memory(self) -> "_Read":
        """Return a copy in page-locked memory. DataLoader calls this in a thread of the rank, if pin_memory is set."""
        return _Read(pytree.tree_map(lambda leaf: leaf.pin_memory(), self.tensors()), self.problem)

    def tensors(self) -> Any:
        return pytree.tree_map(lambda leaf: to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, self.tree)


class _Reader(Dataset[Any]):
    """A Dataset for DataLoader that returns the samples of a whole batch at once."""

    def __init__(self, dataset: Any, is_padded: bool):
        self.dataset = dataset
        self.is_padded = is_padded

    def __getitems__(self, asked: tuple[np.ndarray, Origin]) -> _Read:
        try:
            return _Read(read_samples(self.dataset, asked[0], self.is_padded, asked[1]))
        except DataError as error:  # an error that is raised here would be wrapped in two tracebacks
            return _Read((), str(error))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            return _Read((), f"a sample could not be read: {reason}")


def read_samples(dataset: Any, indices: np.ndarray, is_padded: bool = False, origin: Origin = None) -> Any:
    """Read samples from a Dataset and stack them to a tree of arrays (n, ...).

    Before each sample, the global random generators are seeded for this sample alone. At the end, the generators are as
    before the call.

    A dataset with a method read_batch(indices) returns the tree itself. Then is_padded and origin are ignored, no
    generator is seeded or restored, and nothing is checked.

    Args:
        dataset: the Dataset.
        indices: (n,) the samples, at least one.
        is_padded: whether samples of different lengths are padded with zeros to the longest of them.
        origin: in a training, the epoch's key and the position of the first sample in the epoch, which seed the
            generators; None in an evaluation.

    Returns:
        The tree, built as a sample is, with a NumPy array in place of each number, array or tensor.

    Raises:
        DataError: Samples differ in structure, in shape or in their types of numbers, or have something other than
            numbers. Errors of the Dataset itself are raised unchanged.
    """
    if hasattr(type(dataset), "read_batch"):  # a wrapper may pass on the attributes of another Dataset
        return dataset.read_batch(indices)
    samples = []
    with generators_restored():
        for index, key in zip(indices, sample_keys(indices, origin), strict=True):
            seed_generators(key)
            samples.append(dataset[int(index)])
    if any(isinstance(leaf, Mapping) for leaf in pytree.tree_leaves(samples[0])):
        samples = [replace_mappings(sample) for sample in samples]
    structures = [pytree.tree_structure(sample) for sample in samples]
    for index, structure, sample in zip(indices, structures, samples, strict=True):
        if structure != structures[0]:
            first, other = (pytree.tree_map(lambda leaf: type(leaf).__name__, one) for one in (samples[0], sample))
            raise DataError(
                f"{type(dataset).__name__}: samples must be built alike, got {first} as sample {indices[0]} and "
                f"{other} as sample {index}"
            )
    # torch's default_collate would put tensors into shared memory in a worker
    return pytree.tree_map(lambda *leaves: _stack(dataset, indices, leaves, is_padded), *samples)


def _stack(dataset: Any, indices: np.ndarray, leaves: Sequence[Any], is_padded: bool) -> np.ndarray:
    """Stack the same leaf of several samples' trees to one array (n, ...).

    Args:
        dataset: the Dataset, for messages.
        indices: (n,) the samples, for messages.
        leaves: the leaf of each sample: a number, an array or a tensor.
        is_padded: whether leaves that differ only in their first dimension are padded with zeros at its end, to the
            longest.

    Raises:
        DataError: A leaf has something other than numbers, or the leaves have numbers of different types, or different
            shapes that are not padded. The message names the dataset.
    """
    arrays = [np.asarray(leaf) for leaf in leaves]
    for index, leaf, array in zip(indices, leaves, arrays, strict=True):
        if array.dtype.kind not in KINDS:
            raise DataError(
                f"{type(dataset).__name__}: samples must be numbers, got {type(leaf).__name__} in sample {index}: "
                "leave it out, or encode it as a number"
            )
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:  # the type of the batch would depend on which samples are read together
        some = " and ".join(sorted(map(str, dtypes))[:2])
        raise DataError(
            f"{type(dataset).__name__}: samples must have numbers of one type, got {some}: convert them in the "
            "Dataset, such as by float(number)"
        )
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        can_be_padded = len({shape[1:] for shape in shapes if shape}) == 1 and () not in shapes
        if not (is_padded and can_be_padded):
            some = " and ".join(map(str, sorted(shapes)[:2]))
            remedy = "crop, resize or leave out some"
            if can_be_padded:
                remedy = "pad them, or let the recipe's lengths(split) return these, so that all ranks pad alike"
            raise DataError(f"{type(dataset).__name__}: samples must have the same shape, got {some}: {remedy}")
        longest = max(len(array) for array in arrays)
        arrays = [np.pad(array, [(0, longest - len(array))] + [(0, 0)] * (array.ndim - 1)) for array in arrays]
    return np.stack(arrays)


def _as_it_is(batch: Any) -> Any:
    return batch


def _begin(_: int) -> None:
    """Make this process, a loader worker that has just started, end when its rank ends, in whatever way."""
    sys.excepthook = lambda *_: None  # keeps multiprocessing's thread from printing an error when the rank is killed
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
