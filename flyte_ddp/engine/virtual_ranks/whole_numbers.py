"""Sums of gradients that have the same bits in whatever order, and by however many ranks, they are added up.

Each addend is rounded to whole multiples of a unit, and whole numbers add up to the same in a rank, in a ring or in a
tree. An int32 takes as many bytes as a float32. A unit is a power of two. A block of numbers shares it: a row of a
tensor, or 64 numbers of a tensor of one dimension.

The bound, for up to 2^16 addends of a tensor: rounding moves a number of an addend by at most 2^-12 of the largest
number in all of these addends, or by 2^-127 where that is more. The sum may be smaller than its addends, so the bound
isn't relative to the sum. A block becomes 0 only where the exact sum of what it is rounded to is 0: if a block has a
number that isn't 0, in any addend, the largest of these is at least a unit.

The units follow from the sums of the step before, which all ranks have, so no further exchange is needed. Words for
each block and each tensor travel with the last bucket and tell whether the bound was kept. If it wasn't, the units are
taken from the addends themselves, the step is computed again, and the second sum is final.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor, distributed, nn

BLOCK = 64  # how many numbers of a one-dimensional tensor are a block
# The sizes of DistributedDataParallel's buckets: the first one, and the others
FIRST_BYTES = 1 << 20
BYTES = 25 << 20
FINE = 11  # a tensor's largest addend is at least 2^FINE units, so half a unit is at most 2^-12 of it
STEPS = 8  # exponents are kept in steps of 1/8 bit; each step of training takes away 1/8 of what they are too large by
ROOM = 4  # a block smaller than the largest of its tensor is expected to grow by so many bits
LARGEST_SCALE = 126  # exponent of the largest scale; the unit 2^-126 is the least normal float32


@dataclass(frozen=True)
class Digits:
    """The numbers of bits that gradients get as whole numbers, so that a sum of 2^n of them fits into an int32.

    The unit is chosen by the expected sum, and then each addend must have at least FINE and at most `addend` bits. If
    all addends of a sum of 2^b are alike, each is 2^(b - n); if they are independent, each is about 2^(b - n / 2).
    `total` puts both cases in the middle of what is allowed.

    Attributes:
        addend: the most bits of an addend, so that the sum fits however the addends add up.
        total: the bits that the expected sum gets.
        spread: by how many bits a sum of independent addends is larger than they are: n / 2.
    """

    addend: int
    total: int
    spread: int

    @classmethod
    def for_addends(cls, addends: int) -> "Digits":
        """Return the numbers of bits in sums of this many addends."""
        bits = math.ceil(math.log2(addends))
        spread = math.ceil(bits / 2)
        return cls(30 - bits, min((30 + FINE + spread) // 2, 28 - bits + spread), spread)


@dataclass(frozen=True)
class Places:
    """The places of tensors in a bucket's memory, in which blocks of the same width lie together.

    Attributes:
        order: the numbers of the tensors that have blocks, in the order of the memory.
        blocks: the number of blocks of each of these.
        starts: the place of each tensor's first number, in the order in which the tensors were given.
        groups: the first number, the count and the width of the blocks of each width.
        size: how many numbers the memory has.
    """

    order: list[int]
    blocks: list[int]
    starts: list[int]
    groups: list[tuple[int, int, int]]
    size: int


def lay_out(tensors: Sequence[Tensor]) -> Places:
    """Choose where the numbers of each tensor lie in the memory of a bucket, and return these places.

    Tensors whose blocks (block_shape()) have the same width lie side by side, narrow blocks first. No memory is
    allocated.
    """
    shapes = [block_shape(tensor) for tensor in tensors]
    # Blocks of the same width lie together, so that few kernels measure and scale them
    order = sorted((number for number, (blocks, _) in enumerate(shapes) if blocks), key=lambda one: shapes[one][1])
    starts = [0] * len(tensors)
    groups: list[tuple[int, int, int]] = []
    size = 0
    for width, members in groupby(order, key=lambda number: shapes[number][1]):
        first = size
        for number in members:
            starts[number] = size
            size += shapes[number][0] * width
        groups.append((first, (size - first) // width, width))
        size = -(-size // BLOCK) * BLOCK
    return Places(order, [shapes[number][0] for number in order], starts, groups, size)


class Bucket:
    """The gradients of some tensors in one piece of memory, and the whole numbers that they become.

    A sum begins with start(). After each backward pass, add() adds the gradients to this rank's sum, in int32. send()
    and receive() add the sums of all ranks, and total() turns the result back into gradients. Words, uses and more are
    int32 numbers in the same message, which are added up, too.

    Attributes:
        gradients: (numbers,) float32, each block's in one piece; in the end, the sum over all ranks.
        views: the same memory with each tensor's shape and strides, in the order in which the tensors were given.
        blocks: the number of blocks of each tensor, in the order of the memory.
        scales: (blocks, 1) float32, 1 / unit of each block.
        largest: (blocks, 1) float32, the largest absolute value in each block's addends so far, or in its sum.
        words: what Units writes about all buckets, in the last bucket.
        uses: a number for each tensor, by which the ranks tell whether any part has used it.
        more: other numbers.
    """

    def __init__(self, tensors: Sequence[Tensor], more: int = 0):
        """Lay out the memory.

        Args:
            tensors: the weights whose gradients the bucket has.
            more: how many other numbers travel with the sum.
        """
        device = self.device = tensors[0].device
        place = lay_out(tensors)
        size, groups, starts = place.size, place.groups, place.starts
        self.gradients = torch.zeros(size, dtype=torch.float32, device=device)
        self.views = [_view(tensor, self.gradients[start:]) for tensor, start in zip(tensors, starts, strict=True)]
        self.blocks = place.blocks
        rows = [self.gradients[first:][: blocks * width].view(blocks, width) for first, blocks, width in groups]
        counts = [blocks for _, blocks, _ in groups]
        count = sum(self.blocks)
        self.scales, self.largest, self._high, self._low = torch.zeros(4, count, 1, dtype=torch.float32, device=device)
        by_group = [one.split(counts) for one in (self.scales, self._high, self._low)]
        self._groups = [*zip(rows, *by_group, strict=True)]
        self._more = more
        self._is_first = True
        self.allocate(0)

    def allocate(self, words: int) -> None:
        """Allocate the message: the sum, this many words for Units, `uses` and `more`."""
        sizes = [len(self.gradients), words, len(self.views), self._more]
        self._sent = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        self._sum, self.words, self.uses, self.more = self._sent.split(sizes)
        self._work: distributed.Work | None = None

    def start(self) -> None:
        """Begin a new sum on this rank: the next add() overwrites the old one."""
        self._is_first = True
        self.largest.zero_()

    def add(self) -> None:
        """Add a part's gradients, scaled and rounded to whole numbers, to this rank's sum.

        Call it once for each part of the batch, after the part's last backward pass. `largest` is updated by the
        unscaled gradients. The gradients are scaled and rounded in place, so they are useless afterwards. Numbers that
        are not finite, or too large for the sum, raise nothing: Units.fit() returns False for them.
        """
        torch.maximum(self.largest, self._measure(), out=self.largest)
        for rows, scales, _, _ in self._groups:
            rows.mul_(scales)
        self.gradients.round_()  # numbers that are cut off would make a sum of one sign too small
        if self._is_first:
            self._sum.copy_(self.gradients)
        else:
            self._sum.add_(self.gradients.to(self._sum.dtype))
        self._is_first = False

    def send(self) -> None:
        """Start an all-reduce of this rank's sum, words, uses and more, without waiting for its end."""
        if distributed.get_world_size() > 1:
            self._work = distributed.all_reduce(self._sent, async_op=True)

    def receive(self) -> None:
        """Wait until the all-reduce is done."""
        if self._work:
            self._work.wait()

    def total(self) -> None:
        """Set `gradients` to the sum of all ranks, in float32, and `largest` to the largest values of that."""
        self.gradients.copy_(self._sum)
        for rows, scales, _, _ in self._groups:
            rows.div_(scales)
        self.largest.copy_(self._measure())

    def spoil(self) -> None:
        """Set `gradients` to NaN."""
        self.gradients.fill_(torch.nan)

    def _measure(self) -> Tensor:
        """Return the largest absolute value of each block's gradients, (blocks, 1); NaN if the block has a NaN."""
        for rows, _, high, low in self._groups:
            torch.amax(rows, 1, keepdim=True, out=high)  # both take less time than abs() or aminmax() by row
            torch.amin(rows, 1, keepdim=True, out=low)
        return torch.maximum(self._high, self._low.neg_())


class Units:
    """The units of all blocks of all buckets, and the check that a sum has kept the bound that the module promises.

    Attributes:
        exponents: (blocks, 1) int32, 8 times the exponent of the largest number expected in each block's sum.
    """

    def __init__(self, buckets: Sequence[Bucket], addends: int):
        """Allocate room for words in the last bucket, and expect sums of 1 in all blocks.

        Args:
            buckets: the buckets.
            addends: how many gradients each sum has, over all ranks.
        """
        self._buckets = buckets
        self._digits = Digits.for_addends(addends)
        device = buckets[0].device
        blocks = [*chain.from_iterable(bucket.blocks for bucket in buckets)]
        self._blocks = torch.tensor(blocks, dtype=torch.int64, device=device)  # each tensor's number of blocks
        self._tensor = torch.arange(len(blocks), device=device).repeat_interleave(self._blocks)  # each block's tensor
        self._needed = torch.ones(len(self._tensor) + len(blocks), dtype=torch.float32, device=device)
        self._needed[len(self._tensor) :] = 2.0**FINE
        buckets[-1].allocate(len(self._needed) + 1)
        self._ranks = distributed.get_world_size()
        self.use(torch.zeros(len(self._tensor), 1, dtype=torch.int32, device=device))

    def use(self, exponents: Tensor) -> None:
        """Set `exponents`, and from them the scales (1 / unit) in the buckets.

        Each block of numbers, such as a row of a weight, gets a unit: the power of two that makes the largest expected
        number a whole number of Digits.total bits.

        Args:
            exponents: (blocks, 1) int32, for each block 8 * log2 of the largest number expected in its sum. Fractions
                of a power of two are rounded up.
        """
        self.exponents = exponents.to(self._tensor.device)
        rounded_up = -torch.div(-self.exponents, STEPS, rounding_mode="floor")
        powers = (self._digits.total - rounded_up).clamp_(-LARGEST_SCALE, LARGEST_SCALE)
        scales = (powers + 127 << 23).view(torch.float32)  # the bits of 2^power; pow() may round
        sizes = [len(bucket.scales) for bucket in self._buckets]
        for bucket, of_bucket in zip(self._buckets, scales.split(sizes), strict=True):
            bucket.scales.copy_(of_bucket)
        coarsest = self._by_tensor(scales.reciprocal())
        self._words_scales = torch.cat([scales.view(-1), coarsest.reciprocal()])
        self._words_needed = torch.where(self._words_scales == 2.0**LARGEST_SCALE, 0, self._needed)

    def write_words(self) -> None:
        """Write into the last bucket whether this rank's gradients fit their units, before the bucket is sent.

        There is one word, an int32, for each block and for each tensor. On each rank a word is one of three numbers:

        - 0 if all gradients of the block or tensor are 0.
        - 1 if they are too small for the unit.
        - 1 + the number of ranks if they are large enough.

        The words are added up over the ranks. So a sum from 1 to the number of ranks means that no rank had large
        enough gradients. One more word, the last, is 1 if a gradient is too large or not finite, otherwise 0.
        keep_bound() and fit() read the sums.
        """
        of_blocks = self._largest()
        largest = torch.cat([of_blocks.view(-1), self._by_tensor(of_blocks)])
        scaled = largest * self._words_scales
        is_enough = (scaled >= self._words_needed) & (largest > 0)
        words = self._buckets[-1].words
        words[:-1] = (largest > 0) + self._ranks * is_enough
        words[-1] = ~(scaled < 2.0**self._digits.addend).all()  # NaN isn't smaller, either

    def fit(self) -> bool:
        """Return whether no rank had an addend that was too large for its unit, or not finite.

        The last bucket must have been received.
        """
        return not self._buckets[-1].words[-1]

    def keep_bound(self) -> Tensor:
        """Return whether the sum has kept the bound, () bool on the device: no addend was too large or too small.

        Of each block and each tensor, the largest addend of all ranks counts. The last bucket must have been received.
        """
        words = self._buckets[-1].words
        return ~((words > 0) & (words <= self._ranks)).any()

    def refit_units(self) -> bool:
        """Choose units that fit the gradients of all parts of the batch on all ranks; a collective.

        The method changes `exponents` and the scales (1 / unit) of the buckets. It leaves the sum and the gradients as
        they are: the caller computes the sum again.

        Returns:
            True if all gradients of the parts are finite. False otherwise: a repetition would be in vain.
        """
        largest = self._largest().nan_to_num_(nan=math.inf, posinf=math.inf)
        if self._ranks > 1:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        self.use(self._expected(largest, self._digits.spread))
        return bool(largest.isfinite().all())

    def next_exponents(self) -> Tensor:
        """Return the exponents to use for the next step's sums, from the sums of this step.

        Call it after Bucket.total() of all buckets. `exponents` and the units stay as they are. If a block's sum needs
        a larger exponent, the result has that exponent. If the sum needs a smaller exponent, the result falls by only
        1/8 of the difference, because a block that was large often grows again.

        Returns:
            (blocks, 1) int32, 8 times the exponents, as use() takes them.
        """
        expected = self._expected(self._largest(), 0)
        excess = (self.exponents - expected).clamp_(min=0)
        return expected + (excess * (STEPS - 1) >> 3)

    def _expected(self, largest: Tensor, bits: int) -> Tensor:
        """Return the exponents to expect for sums that are 2^bits times as large as `largest`.

        - A block gets what its largest number needs, and ROOM bits more in case the block grows, but at most what the
          largest number of the whole tensor needs.
        - A block of zeros keeps its present exponent, up to the same limit.
        - In a tensor of zeros, all blocks keep their exponents.

        No result asks for a unit below 2^-126.

        Args:
            largest: (blocks, 1) float32, the largest absolute value of each block.
            bits: how many bits larger the sums are.

        Returns:
            (blocks, 1) int32, 8 times the exponents.
        """
        least = self._digits.total - LARGEST_SCALE
        of_tensor = self._by_tensor(largest)[self._tensor].unsqueeze(1)
        most = (torch.frexp(of_tensor).exponent + bits).clamp_(min=least) * STEPS
        most = torch.where(of_tensor > 0, most, self.exponents)
        roomy = (torch.frexp(largest).exponent + bits + ROOM).clamp_(min=least) * STEPS
        return torch.where(largest > 0, roomy, self.exponents).minimum(most)

    def _largest(self) -> Tensor:
        """Return `largest` of all buckets, one after the other: (blocks, 1)."""
        return torch.cat([bucket.largest for bucket in self._buckets])

    def _by_tensor(self, numbers: Tensor) -> Tensor:
        """Return the largest number among each tensor's blocks, (tensors,), from (blocks, 1)."""
        # scatter_reduce counts as not deterministic on a GPU, even where it is
        return torch.segment_reduce(numbers.view(-1), "max", lengths=self._blocks, unsafe=True)


def group_tensors(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide tensors among buckets, and return the tensors of each bucket.

    The order is reversed, because the gradients of the last layers come first: the first bucket has the last tensors.
    It has at most FIRST_BYTES (float32), the others at most BYTES. A single tensor may be larger.

    Args:
        tensors: the trained weights, at least one, in the order of the network.
    """
    groups: list[list[Tensor]] = [[]]
    size = 0
    limit = FIRST_BYTES
    for tensor in reversed(tensors):
        if groups[-1] and size + 4 * tensor.numel() > limit:
            groups.append([])
            size = 0
            limit = BYTES
        groups[-1].append(tensor)
        size += 4 * tensor.numel()
    return groups


def block_shape(tensor: Tensor) -> tuple[int, int]:
    """Return how many blocks a tensor's numbers are divided into, and how many numbers each block has.

    If the tensor has rows of more than one number, each row is a block. Otherwise, as with a bias, a block has BLOCK
    consecutive numbers, and the last block may be partly empty. A tensor without numbers has 0 blocks.
    """
    if tensor.ndim < 2 or tensor.numel() == len(tensor):
        return -(-tensor.numel() // BLOCK), BLOCK
    return (len(tensor), tensor.numel() // len(tensor)) if tensor.numel() else (0, BLOCK)


def _view(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return a view of the beginning of a memory, in the shape of a tensor.

    If the tensor is a parameter that is not contiguous, the view has the strides of its gradient, on which fused
    optimizers rely.

    Args:
        tensor: gives the shape.
        memory: (numbers,), at least as long as the tensor has numbers.
    """
    if isinstance(tensor, nn.Parameter) and not tensor.is_contiguous():
        strides = torch.empty_like(tensor).stride()
        return memory.as_strided(tensor.shape, strides, memory.storage_offset())
    return memory[: tensor.numel()].view(tensor.shape)
