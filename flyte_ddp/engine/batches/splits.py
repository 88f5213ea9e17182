"""The samples of a split, wherever they are, and their tensors by index."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.engine.batches.arrays import KINDS, replace_mappings, to_tensor
from flyte_ddp.engine.batches.block_split import BlockSplit
from flyte_ddp.engine.batches.lengths import Lengths, get_lengths
from flyte_ddp.engine.batches.order import shuffled
from flyte_ddp.engine.batches.sample_seeds import NOWHERE, Origin
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.random_numbers import Use, derive_key
from flyte_ddp.text import listed


class Split(Protocol):
    """The samples of a split, wherever they are.

    Attributes:
        remedy: what to do about a rank that waits for its samples longer than others.
    """

    device: torch.device
    remedy: str

    def __len__(self) -> int: ...

    def fetch(self, parts: Iterable[Tensor], origins: Iterable[Origin] = NOWHERE) -> Iterator[Any]:
        """Yield the samples of each part, as a tree of tensors (n, ...) on the device.

        Args:
            parts: for each part its sample indices, (n,) int64 on the CPU.
            origins: for each part the epoch's key and the position of its first sample, which seed a Dataset's random
                numbers. By default every part belongs to an evaluation.

        Raises:
            DataError: A sample cannot be read, or does not fit the others.
        """


class Resident:
    """A split of tensors (N, ...) that are on the device, single or nested. Memory maps among them stay on disk."""

    def __init__(self, data: Any, device: torch.device):
        """Put the data on the device.

        Args:
            data: tensors and arrays with equally many rows, single or nested.
            device: the rank's device.

        Raises:
            InputError: The data cannot be trained on. The message does not name the split; the caller adds that.
        """
        self.device = device
        self.remedy = "look for other programs on its host, at what augment does, and at the disk of memory maps"
        self.lengths: Lengths | None = None
        leaves, self._structure = pytree.tree_flatten(replace_mappings(data))
        leaves = [_convert_leaf(leaf) for leaf in leaves]
        lengths = [len(leaf) if leaf.ndim else 0 for leaf in leaves]
        if not lengths or min(lengths) < 1 or len(set(lengths)) > 1:
            shapes = listed([str(tuple(leaf.shape)) for leaf in leaves]) or "no tensors"
            if all(leaf.ndim for leaf in leaves) and set(lengths) == {0}:
                raise InputError(f"the split is empty, it must have samples: its tensors are {shapes}")
            raise InputError(
                f"the first dimension has to be the samples, as many in all tensors, got {shapes}: stack them, "
                "give all as many, or return a Dataset"
            )
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                bad = int(leaf.isfinite().logical_not().nonzero()[0, 0])
                raise InputError(f"sample {bad} has a NaN or infinite value: fix it, or leave it out")
        self._leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def fetch(self, parts: Iterable[Tensor], origins: Iterable[Origin] = NOWHERE) -> Iterator[Any]:
        for part in parts:
            indices = self._to_device(part)
            leaves = [leaf[indices] if isinstance(leaf, Tensor) else self._read(leaf, part) for leaf in self._leaves]
            yield pytree.tree_unflatten(leaves, self._structure)

    def _read(self, leaf: np.memmap, indices: Tensor) -> Tensor:
        return self._to_device(to_tensor(leaf[indices.numpy()]))

    def _to_device(self, read: Tensor) -> Tensor:
        # The copy is asynchronous only from page-locked memory
        read = read.pin_memory() if self.device.type == "cuda" else read
        return read.to(self.device, non_blocking=True)


def _convert_leaf(leaf: Any) -> Tensor | np.memmap:
    """Convert a tensor or array of the data to a tensor that needs no gradient, but return a memory map as it is.

    The result shares the leaf's memory. Only an array that torch cannot hold as it is, such as one with swapped bytes,
    is copied.

    Raises:
        InputError: the leaf is neither a dense tensor nor an array of numbers.
    """
    if not isinstance(leaf, (Tensor, np.ndarray)):
        raise InputError(f"data must be tensors, arrays or a Dataset, got {type(leaf).__name__}")
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
        kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        raise InputError(f"data must be dense tensors, got a {kind} one: pad it, call to_dense(), or return a Dataset")
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in KINDS:
        raise InputError(f"data must be numbers, got {leaf.dtype.name}: leave it out, or encode it as numbers")
    if isinstance(leaf, np.memmap):
        return leaf
    return leaf.detach() if isinstance(leaf, Tensor) else to_tensor(leaf)


class Subset:
    """Some samples of a split: `count` of them. at(positions (n,) int64) returns their indices in the split."""

    def __init__(self, split: Split, count: int, at: Callable[[Tensor], Tensor]):
        self.split = split
        self.count = count
        self.at = at
        self.device = split.device
        self.remedy = split.remedy
        lengths = get_lengths(split)
        self.lengths = lengths.of(at(torch.arange(count))) if lengths else None

    def __len__(self) -> int:
        return self.count

    def fetch(self, parts: Iterable[Tensor], origins: Iterable[Origin] = NOWHERE) -> Iterator[Any]:
        return self.split.fetch((self.at(part) for part in parts), origins)


def hold_out(split: Split, fraction: float) -> tuple[Split, Split]:
    """Divide a split at random into two splits: one to train on, and one to validate on.

    The same samples are held out on every machine and for any settings.seed. So runs can be compared, and a training
    that starts from another one's weights has not seen its validation samples. A split in blocks holds out whole
    blocks.

    Args:
        split: the split.
        fraction: the share of the samples to hold out.

    Returns:
        The split to train on, and that of the held-out samples. Both read from the given split.

    Raises:
        InputError: One of the two would be empty.
    """
    if isinstance(split, BlockSplit):
        return split.hold_out(fraction)
    samples = len(split)
    count = round(fraction * samples)
    if not 0 < count < samples:
        raise InputError(f"validation_fraction must leave a sample on either side of {samples}, got {fraction:g}")
    key = derive_key(Use.HELD_OUT)
    held = Subset(split, count, lambda positions: shuffled(positions, samples, key))
    return Subset(split, samples - count, lambda positions: shuffled(positions + count, samples, key)), held


def spread(split: Split, count: int) -> Tensor:
    """Choose samples for a trial, evenly from all over the split: (count,) int64 indices, ascending.

    Of a split in blocks, the samples are from a few blocks that are far apart. Indices come several times if the split,
    or these blocks, have fewer than `count` samples.
    """
    if isinstance(split, BlockSplit):
        return split.spread(count)
    return torch.arange(count) * (len(split) - 1) // max(count - 1, 1)  # linspace would round in float32
