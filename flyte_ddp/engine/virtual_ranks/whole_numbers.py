"""Sums of gradients that are the same bits in whatever order, and by however many ranks, they are added up.

Each addend becomes whole numbers: multiples of a power of two, which is that of a block of 64 neighbours, so that a
rare token's row keeps its digits beside others that are 2^40 times as large; a statistic of batch norm has one of its
own. Whole numbers add up to the same in a rank, in a ring or in a tree. An int32 is sent in as many bytes as a float32.

What the power of two is follows from the sum of the step before, which all ranks have: no collective is needed for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

BLOCK = 64  # numbers of one parameter with the same power of two
GROWTH = 6  # bits that an addend may grow by from one step to the next
FIRST_BYTES, BYTES = 1 << 20, 25 << 20  # of buckets, as DistributedDataParallel has them
WIDE_GROWTH = 20  # of statistics, which are few: hardly one ever outgrows it
FALL = 8  # steps in which what is expected of a smaller block loses a bit: not at once, as it may come back
LEAST = -84  # exponent of a block whose sum is smaller; with it, Bucket's scales are float32 numbers, too


@dataclass(frozen=True)
class Digits:
    """How the bits of a whole number are used, for sums of so many addends.

    Attributes:
        addend: bits of each addend, so that the sum fits however they add up.
        total: bits of a sum as large as that of the step before.
        cancelled: by how many bits an addend is expected to be larger than the sum, at most: as independent noise is,
            by a half of log2 of their number.
        block: how many neighbours have the same power of two.
        type: of the whole numbers.
    """

    addend: int
    total: int
    cancelled: int
    block: int
    type: torch.dtype

    @classmethod
    def of(cls, addends: int) -> "Digits":
        bits, cancelled = _bits_of(addends)
        return cls(30 - bits, 30 - GROWTH - cancelled, cancelled, BLOCK, torch.int32)

    @classmethod
    def wide(cls, addends: int) -> "Digits":
        """For numbers that have nothing to do with their neighbours."""
        bits, cancelled = _bits_of(addends)
        return cls(62 - bits, 62 - WIDE_GROWTH - cancelled, cancelled, 1, torch.int64)


class Bucket:
    """The gradients of some tensors, one after the other, and the whole numbers that they become.

    Attributes:
        gradients: (blocks, digits.block) float32, each tensor's from a block of its own on; in the end, the sum.
        views: the same memory, as each tensor lies.
        largest: (blocks, 1) of what has been looked at.
        more: (more,) whole numbers, which are sent along, for others to use.
        exponents: (blocks, 1) int32 of the largest number that is expected in each block's sum, times FALL.
    """

    def __init__(self, tensors: Sequence[Tensor], digits: Digits, more: int = 0):
        device, block = tensors[0].device, digits.block
        sizes = [-(-tensor.numel() // block) * block for tensor in tensors]
        size = max(sum(sizes), block)  # of nothing there is no largest
        self._digits = digits
        self.gradients = torch.zeros(size // block, block, dtype=torch.float32, device=device)
        pieces = self.gradients.view(-1)[: sum(sizes)].split(sizes)
        self.views = [_like(tensor, piece) for tensor, piece in zip(tensors, pieces, strict=True)]
        self._sent = torch.zeros(size + 1 + more, dtype=digits.type, device=device)
        self._sum, self._misfits, self.more = self._sent.split([size, 1, more])
        self._sum = self._sum.view_as(self.gradients)
        self._scales = torch.ones(size // block, 1, dtype=torch.float32, device=device)
        self._peak: Tensor | None = None  # of the addends, as whole numbers; None before the first
        self.largest = torch.zeros(size // block, 1, dtype=torch.float32, device=device)
        self._work: distributed.Work | None = None
        self.exponents = torch.zeros(size // block, 1, dtype=torch.int32, device=device)

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
            self._sum.add_(scaled.to(self._sum.dtype))
            self._peak = torch.maximum(self._peak, peak)

    def look(self) -> None:
        """Instead of add: keeps the largest addend of each block."""
        self.largest = torch.maximum(self.largest, self.gradients.abs().amax(1, keepdim=True))

    def send(self) -> None:
        """Starts to add up the sums of all ranks."""
        assert self._peak is not None  # after an addend
        self._misfits.copy_(~(self._peak < 2.0**self._digits.addend))  # NaN doesn't fit either
        if distributed.get_world_size() > 1:
            self._work = distributed.all_reduce(self._sent, async_op=True)

    def receive(self) -> Tensor:
        """(1,): how many ranks had addends that did not fit."""
        if self._work:
            self._work.wait()
        return self._misfits

    def total(self) -> None:
        """Makes the gradients the sum of all ranks, and has the next step's numbers follow from it."""
        self.gradients.copy_(self._sum).div_(self._scales)
        largest = self.gradients.abs().amax(1, keepdim=True)
        # Not at once to what is smaller, and where nothing was added, there is nothing to follow
        followed = torch.maximum(exponents_of(largest) * FALL, self.exponents - 1)
        self.follow(torch.where(largest > 0, followed, self.exponents))

    def expect(self, largest: Tensor) -> None:
        """largest: (blocks, 1) addend of each block, on all ranks; of zeros as of the bucket's largest."""
        largest = torch.where(largest > 0, largest, largest.amax())
        self.follow((exponents_of(largest) + self._digits.cancelled) * FALL)

    def follow(self, exponents: Tensor) -> None:
        """exponents: as the attribute."""
        self.exponents = exponents
        rounded_up = -torch.div(-exponents, FALL, rounding_mode="floor")
        torch.ldexp(torch.ones_like(self._scales), self._digits.total - rounded_up, out=self._scales)


def exponents_of(largest: Tensor) -> Tensor:
    """int32: the least e for each with largest < 2^e, but at least LEAST; 0 for 0."""
    return torch.frexp(largest).exponent.clamp(min=LEAST)


def _bits_of(addends: int) -> tuple[int, int]:
    bits = math.ceil(math.log2(addends))
    return bits, math.ceil(bits / 2)


def buckets_of(tensors: Sequence[Tensor], digits: Digits) -> list[Bucket]:
    """The tensors in reverse, as their gradients come."""
    groups: list[list[Tensor]] = [[]]
    size, limit = 0, FIRST_BYTES
    for tensor in reversed(tensors):
        if groups[-1] and size + 4 * tensor.numel() > limit:
            groups.append([])
            size, limit = 0, BYTES
        groups[-1].append(tensor)
        size += 4 * tensor.numel()
    return [Bucket(group, digits) for group in groups]


def _like(tensor: Tensor, piece: Tensor) -> Tensor:
    """The beginning of a piece of memory, with a tensor's strides, on which fused optimizers rely."""
    if isinstance(tensor, nn.Parameter) and not tensor.is_contiguous():
        strides = torch.empty_like(tensor).stride()
        return piece.as_strided(tensor.shape, strides, piece.storage_offset())
    return piece[: tensor.numel()].view(tensor.shape)
