"""Sums of gradients that are the same bits in whatever order, and by however many ranks, they are added up.

Each addend becomes whole numbers: multiples of a power of two, which is that of a block of 64 neighbours, so that a
rare token's row keeps its digits beside others that are 2^40 times as large. Whole numbers add up to the same in a
rank, in a ring or in a tree. An int32 is sent in as many bytes as a float32.

What the power of two is follows from the sum of the step before, which all ranks have: no collective is needed for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, distributed, nn

BLOCK = 64  # numbers of one parameter with the same power of two
GROWTH = 6  # bits that an addend may grow by from one step to the next
FIRST_BYTES, BYTES = 1 << 20, 25 << 20  # of buckets, as DistributedDataParallel has them
LEAST = -90  # exponent of a block whose sum is smaller, and of which 2^-exponent is a float32, too


@dataclass(frozen=True)
class Digits:
    """How the 31 bits of a whole number are used, for sums of so many addends.

    Attributes:
        addend: bits of each addend, so that the sum fits however they add up.
        total: bits of a sum as large as that of the step before.
        cancelled: by how many bits an addend is expected to be larger than the sum, at most: as independent noise is,
            by a half of log2 of their number.
    """

    addend: int
    total: int
    cancelled: int

    @classmethod
    def of(cls, addends: int) -> "Digits":
        bits = math.ceil(math.log2(addends))
        return cls(addend=30 - bits, total=30 - GROWTH - math.ceil(bits / 2), cancelled=math.ceil(bits / 2))


class Grid:
    """The powers of two by which blocks become whole numbers; the same on all ranks.

    Attributes:
        exponents: (blocks, 1) int32 of the largest number that is expected in each block's sum.
        scales: (blocks, 1) what its numbers are multiplied by.
        largest: (blocks, 1) for what has been found in it.
    """

    def __init__(self, blocks: int, digits: Digits, device: torch.device):
        self._digits = digits
        self.exponents = torch.zeros(blocks, 1, dtype=torch.int32, device=device)
        self.scales, self.largest = torch.ones(blocks, 1, device=device), torch.zeros(blocks, 1, device=device)

    def follow_sums(self) -> None:
        """largest: of the sums. Not at once to what is smaller; where nothing was added, there is nothing to follow."""
        followed = torch.maximum(exponents_of(self.largest), self.exponents - 1)
        self.follow(torch.where(self.largest > 0, followed, self.exponents))

    def follow_addends(self, buckets: Sequence["Bucket"]) -> None:
        """largest: of the addends, on all ranks. A block of zeros is as the largest of its bucket."""
        for bucket in buckets:
            bucket.largest.copy_(torch.where(bucket.largest > 0, bucket.largest, bucket.largest.amax()))
        self.follow(exponents_of(self.largest) + self._digits.cancelled)

    def follow(self, exponents: Tensor) -> None:
        self.exponents.copy_(exponents)
        torch.ldexp(torch.ones_like(self.scales), self._digits.total - self.exponents, out=self.scales)


class Bucket:
    """The gradients of some tensors, one after the other, and the whole numbers that they become.

    Attributes:
        gradients: (blocks, BLOCK) float32, each tensor's from a block of its own on; after the last addend, the sum.
        views: the same memory, as each tensor lies.
        largest: (blocks, 1) the grid's.
        more: (even,) int32, which is sent along, for others to use.
    """

    def __init__(self, tensors: Sequence[Tensor], grid: Grid, first: int, digits: Digits, more: int = 0):
        """first: its first block in the grid."""
        device, sizes = tensors[0].device, sizes_of(tensors)
        self._digits, size = digits, sum(sizes)
        self.gradients = torch.zeros(size // BLOCK, BLOCK, device=device)
        pieces = self.gradients.view(-1).split(sizes)
        self.views = [_like(tensor, piece) for tensor, piece in zip(tensors, pieces, strict=True)]
        blocks = slice(first, first + len(self.gradients))
        self._scales, self.largest = grid.scales[blocks], grid.largest[blocks]
        self._sent = torch.zeros(size + 2 + more, dtype=torch.int32, device=device)
        self._sum, misfits, self.more = self._sent.split([size, 2, more])
        self._sum = self._sum.view_as(self.gradients)
        self._misfits = misfits[:1]
        self._peak: Tensor | None = None  # of the addends, as whole numbers; None before the first
        self._work: distributed.Work | None = None

    def start(self) -> None:
        """Begins a new sum."""
        self._peak = None

    def add(self) -> None:
        """Adds the gradients to the sum, and makes them something else."""
        scaled = self.gradients.mul_(self._scales).round_()  # cut off, many addends of one sign would be too small
        low, high = scaled.aminmax()
        peak = torch.maximum(-low, high)
        if self._peak is None:
            self._sum.copy_(scaled)
            self._peak = peak
        else:
            self._sum.add_(scaled.int())
            self._peak = torch.maximum(self._peak, peak)

    def look(self) -> None:
        """Instead of add: keeps the largest addend of each block."""
        torch.maximum(self.largest, self.gradients.abs().amax(1, keepdim=True), out=self.largest)

    def send(self) -> None:
        """Starts to add up the sums of all ranks."""
        assert self._peak is not None  # after an addend
        self._misfits.copy_(~(self._peak < 2.0**self._digits.addend))  # NaN doesn't fit either
        if distributed.get_world_size() > 1:
            self._work = distributed.all_reduce(self._sent, async_op=True)

    def receive(self) -> Tensor:
        """(1,) int32: how many ranks had addends that did not fit."""
        if self._work:
            self._work.wait()
        return self._misfits

    def total(self) -> None:
        """Makes the gradients the sum of all ranks, and notes its largest numbers."""
        self.gradients.copy_(self._sum).div_(self._scales)
        torch.amax(self.gradients.abs(), 1, keepdim=True, out=self.largest)


def exponents_of(largest: Tensor) -> Tensor:
    """int32: the least e for each with largest < 2^e, but at least LEAST; 0 for 0."""
    return torch.frexp(largest).exponent.clamp(min=LEAST)


def buckets_of(tensors: Sequence[Tensor], digits: Digits, more: int) -> tuple[Grid, list[Bucket]]:
    """The tensors in reverse, as their gradients come; `more` in the first."""
    groups: list[list[Tensor]] = [[]]
    size, limit = 0, FIRST_BYTES
    for tensor in reversed(tensors):
        if groups[-1] and size + 4 * tensor.numel() > limit:
            groups.append([])
            size, limit = 0, BYTES
        groups[-1].append(tensor)
        size += 4 * tensor.numel()
    blocks = [sum(sizes_of(group)) // BLOCK for group in groups]
    grid, firsts = Grid(sum(blocks), digits, tensors[0].device), [0, *accumulate(blocks)]
    return grid, [
        Bucket(group, grid, first, digits, 0 if first else more) for group, first in zip(groups, firsts, strict=False)
    ]


def sizes_of(tensors: Sequence[Tensor]) -> list[int]:
    """In whole blocks."""
    return [-(-tensor.numel() // BLOCK) * BLOCK for tensor in tensors]


def _like(tensor: Tensor, piece: Tensor) -> Tensor:
    """The beginning of a piece of memory, with a tensor's strides, on which fused optimizers rely."""
    if isinstance(tensor, nn.Parameter) and not tensor.is_contiguous():
        strides = torch.empty_like(tensor).stride()
        return piece.as_strided(tensor.shape, strides, piece.storage_offset())
    return piece[: tensor.numel()].view(tensor.shape)
