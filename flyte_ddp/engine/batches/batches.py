"""The batches of a split: the order of its samples, and this rank's share of each batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.batches.block_split import BlocksInOrder, BlockSplit
from flyte_ddp.engine.batches.lengths import SimilarLengths, get_lengths
from flyte_ddp.engine.batches.order import shuffled
from flyte_ddp.engine.batches.sample_seeds import Origin
from flyte_ddp.engine.batches.splits import Split
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.random_numbers import Use, derive_key

LOOKED_UP = 1 << 14  # how many of its samples a rank looks up in the order at once


@dataclass(frozen=True)
class Batch:
    """Samples of a global batch that one rank computes together.

    Attributes:
        tree: tensors (n, ...), single or nested.
        share: the place of these samples in the global batch.
        seed: the seed of the random numbers that the step draws.
    """

    tree: Any
    share: BatchShare
    seed: int = 0

    def parts(self, most: int, ranks: int = 0) -> list["Batch"]:
        """Cut the batch into parts of at most `most` consecutive samples, and return them.

        Args:
            most: the largest number of samples in a part; 0 gives [self].
            ranks: the number of ranks, if all of them need equally many parts because each part has collectives; 0 if
                not. The list is then filled up, to the length of the longest one of any rank, with the first part,
                marked as borrowed: it counts for nothing.
        """
        if not most:
            return [self]
        count = self.share.count
        parts = [self] if count <= most else [self._cut(start, most) for start in range(0, count, most)]
        largest = -(-self.share.size // ranks) if ranks else 0
        again = replace(parts[0], share=replace(parts[0].share, borrowed=True))
        return parts + [again] * (-(-largest // most) - len(parts))

    def _cut(self, start: int, most: int) -> "Batch":
        """Return the samples from this one on, `most` at most."""
        tree = pytree.tree_map(lambda leaf: leaf[start : start + most], self.tree)
        count = min(most, self.share.count - start)
        return replace(self, tree=tree, share=replace(self.share, first=self.share.first + start, count=count))


class Order(Protocol):
    """An order of a split's samples in an epoch."""

    def at(self, positions: Tensor) -> Tensor:
        """Return the indices, in the split, of the samples at these positions of the epoch.

        Positions are (n,) int64, ascending; the indices are (n,) int64, too.
        """

    def fetch(self, parts: Iterable[Tensor], steps: range) -> Iterator[Any]:
        """Yield the samples of each step, as a tree of tensors (n, ...) on the device.

        For each of the steps, `parts` has the samples' indices in the split, (n,) int64.
        """

    def check_room(self) -> None:
        """Raise InputError if this machine has too little disk for the blocks that the order needs at a time."""


class Shuffled:
    """An order that shuffles each pass over the samples by a key of its own.

    Args:
        split: the samples.
        keys: the key of each pass; None leaves the samples in the split's order.
        origin: origin(step) returns the sample_seeds.Origin of this rank's samples, from which a Dataset's random
            numbers follow.
    """

    def __init__(self, split: Split, keys: Sequence[int | None], origin: Callable[[int], Origin] = lambda step: None):
        self.split = split
        self.keys = keys
        self.origin = origin

    def at(self, positions: Tensor) -> Tensor:
        size = len(self.split)
        samples = positions % size
        for number, key in enumerate(self.keys):
            of_pass = positions // size == number
            if key is not None and of_pass.any():
                samples[of_pass] = shuffled(samples[of_pass], size, key)
        return samples

    def fetch(self, parts: Iterable[Tensor], steps: range) -> Iterator[Any]:
        return self.split.fetch(parts, (self.origin(step) for step in steps))

    def check_room(self) -> None:
        pass


def rank_slice(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Divide range(start, stop) among the ranks, and return where this rank's slice begins and ends.

    The slices' sizes differ by at most one. Rank 0 has one of the largest; others may be empty.
    """
    first, last = (start + -(-(stop - start) * number // world_size) for number in (rank, rank + 1))
    return first, last


def parts_of_rank(virtual_ranks: int, rank: int, world_size: int) -> range:
    """Return the numbers of the virtual ranks that a rank computes: consecutive ones, divided as evenly as possible."""
    return range(virtual_ranks * rank // world_size, virtual_ranks * (rank + 1) // world_size)


class _Batches:
    """A rank's shares of the global batches: the samples that it computes.

    Without virtual ranks a rank has one share of each global batch. With them, a global batch has a part for each
    virtual rank, on any number of ranks, and each part that this rank computes is a share.
    """

    # Whether, with virtual ranks, all ranks get as many shares in a step as the one with most. Those that are added are
    # copies, marked as borrowed. All ranks are needed to make a unit of a sharded network whole
    is_even = False

    def __init__(
        self,
        split: Split,
        samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        virtual_ranks: int = 0,
    ):
        self.split = split
        self.samples = samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.virtual_ranks = virtual_ranks
        self.parts = parts_of_rank(virtual_ranks, rank, world_size)

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def samples_until(self, step: int) -> int:
        """Return the number of samples in the first `step` steps of an epoch, over all ranks."""
        return min(self.samples, step * self.batch_size)

    def own(self, step: int) -> slice:
        """Return which positions of the epoch's order this rank has in a step. The slice may be empty."""
        if self.virtual_ranks:
            return slice(self._cut(step, self.parts[0]).start, self._cut(step, self.parts[-1]).stop)
        return self._cut(step, self.rank, self.world_size)

    def _cut(self, step: int, number: int, count: int = 0) -> slice:
        """Return part `number` of the `count` parts of a step's global batch, as a slice of positions in the epoch.

        It may be empty. A count of 0 is the number of virtual ranks.
        """
        start, stop = self.samples_until(step), self.samples_until(step + 1)
        return slice(*rank_slice(start, stop, number, count or self.virtual_ranks))

    def sizes(self) -> list[int]:
        """Return how many samples of its own this rank has in the first and in the last step; each may be 0.

        With virtual ranks, return instead the sizes of all virtual ranks' parts in these two steps: each size above 0
        once, ascending.
        """
        ends = 0, len(self) - 1
        if not self.virtual_ranks:
            return [own.stop - own.start for own in map(self.own, ends)]
        cuts = [self._cut(step, number) for step, number in product(ends, range(self.virtual_ranks))]
        return sorted({cut.stop - cut.start for cut in cuts} - {0})

    def shares(self) -> int:
        """Return how many shares with samples this rank has in all steps of an epoch together."""
        return sum(map(self._count_shares, range(len(self))))

    def _count_shares(self, step: int) -> int:
        cuts = [self._cut(step, number) for number in self.parts] if self.virtual_ranks else [self.own(step)]
        return sum(cut.start < cut.stop for cut in cuts)

    def parts_with_samples(self, step: int) -> list[int]:
        """Return the numbers of the virtual ranks that have samples in a step. A short batch may leave some without."""
        cuts = ((number, self._cut(step, number)) for number in range(self.virtual_ranks))
        return [number for number, cut in cuts if cut.start < cut.stop]

    def _order(self, keys: Sequence[int | None], origin: Callable[[int], Origin] = lambda step: None) -> Order:
        """Return an order of the split's samples, shuffled by keys, for one or more passes over the samples.

        A split in blocks gives a BlocksInOrder; any other split gives a Shuffled. Without shuffling, a Shuffled keeps
        the split's order, but a BlocksInOrder takes samples from several places of the split in turn.

        Args:
            keys: the key that shuffles each pass; None leaves the pass unshuffled.
            origin: origin(step) returns the epoch's key and the position of this rank's first sample in the step, which
                seed a Dataset's random numbers. With None, a sample gets the same random numbers each time.

        Raises:
            InputError: A split in blocks is given several keys: it can have only one pass.
        """
        if isinstance(self.split, BlockSplit):
            return BlocksInOrder(self.split, keys, self.batch_size, self.samples, self._computed)
        return Shuffled(self.split, keys, origin)

    def _fetch(self, order: Order, steps: range) -> Iterator[tuple[int, list[tuple[Any, BatchShare]]]]:
        """Read this rank's samples of these steps, and yield (step, shares) for each step. Nothing is exchanged.

        A share is (tree, BatchShare): samples as tensors (n, ...) on the device, and their place in the step's global
        batch. Without virtual ranks, a step has one share. With them, it has one for each of this rank's virtual ranks
        that has samples. If self.is_even is set, borrowed shares are added until all ranks have equally many.

        A rank without samples in a step gets one share with one sample of another rank, marked as borrowed: it counts
        for nothing. If the samples have lengths, all ranks pad to the longest sample of the global batch.

        Raises:
            DataError: A sample or block cannot be read, or does not fit the others. This rank alone raises it.
            DownloadError: The storage fails to deliver a block. This rank alone raises it.
            InputError: A block cannot be written to the node's disk. This rank alone raises it.
        """
        lengths = get_lengths(self.split)
        trees = order.fetch(self._parts(order, steps), steps)
        for step, tree in zip(steps, trees, strict=True):
            start, stop = self.samples_until(step), self.samples_until(step + 1)
            own = self.own(step)
            part = self._computed(step)
            count = part.stop - part.start
            is_borrowed = own != part
            if lengths:  # all ranks pad the whole global batch alike
                global_indices = order.at(torch.arange(start, stop))
                tree = lengths.padded(tree, global_indices[part.start - start : part.stop - start], global_indices)
            share = BatchShare(part.start - start, count, stop - start, is_borrowed, self.rank)
            shares = [*self._cut_up(step, tree, share)] if self.virtual_ranks else [(tree, share)]
            yield step, shares + self._fill_up(step, shares) if self.is_even else shares

    def _cut_up(self, step: int, tree: Any, share: BatchShare) -> Iterator[tuple[Any, BatchShare]]:
        """Cut this rank's samples of a step into one share for each of its virtual ranks, and yield these shares.

        Virtual ranks without samples are left out. A borrowed share is yielded as it is, not cut or copied.

        Args:
            step: the number of the step in the epoch.
            tree: the rank's samples.
            share: their place in the global batch.

        Yields:
            A copy of a virtual rank's samples, and a BatchShare whose `part` is the virtual rank's number.
        """
        if share.borrowed:
            yield tree, share
            return
        first = self.samples_until(step) + share.first
        for number in self.parts:
            cut = self._cut(step, number)
            rows = slice(cut.start - first, cut.stop - first)
            count = cut.stop - cut.start
            if count:
                # The part gets memory of its own, since a kernel's choice may depend on where a tensor begins
                cut_share = replace(share, first=share.first + rows.start, count=count, part=number)
                yield pytree.tree_map(lambda leaf, rows=rows: leaf[rows].clone(), tree), cut_share

    def _fill_up(self, step: int, shares: list[tuple[Any, BatchShare]]) -> list[tuple[Any, BatchShare]]:
        """Return the shares that this rank lacks in a step to have as many as the rank with most.

        The returned shares are copies of the rank's last share, marked as borrowed: they count for nothing. Ranks need
        equally many shares if each share has collectives.

        Args:
            step: the number of the step in the epoch.
            shares: the shares that the rank has; at least one. The list is not changed.
        """
        used = self.parts_with_samples(step)
        by_rank = [parts_of_rank(self.virtual_ranks, rank, self.world_size) for rank in range(self.world_size)]
        most = max(sum(part in parts for part in used) for parts in by_rank)
        tree, share = shares[-1]
        borrowed = replace(share, borrowed=True)
        return [(pytree.tree_map(torch.clone, tree), borrowed) for _ in range(most - len(shares))]

    def _computed(self, step: int) -> slice:
        """Return which positions this rank computes in a step: its own, or if it has none, the one before them."""
        own = self.own(step)
        return own if own.start < own.stop else slice(own.start - 1, own.start)

    def _parts(self, order: Order, steps: Sequence[int]) -> Iterator[Tensor]:
        """Yield, for each step, the indices (n,) int64, in the split, of the samples that this rank computes.

        A rank without samples of its own in a step computes a sample of another rank. Many steps are looked up in the
        order at once, which costs less.
        """
        at_once = max(1, LOOKED_UP * self.world_size // self.batch_size)
        for start in range(0, len(steps), at_once):
            parts = [self._computed(step) for step in steps[start : start + at_once]]
            positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
            yield from order.at(positions).split([part.stop - part.start for part in parts])


class TrainBatches(_Batches):
    """A rank's shares of the shuffled global batches of an epoch.

    The global batches follow from seed, epoch and step alone, and not from what ran before or from the number of ranks.
    So a run that resumes in the middle of an epoch, even on other ranks, sees the same samples as an uninterrupted one.

    Args:
        split: the samples.
        batch_size: samples of a global batch.
        seed: the seed of the order and of the random numbers.
        rank: this rank.
        world_size: the number of ranks.
        passes: how many passes over the samples an epoch has.
        fraction: the part of these passes that an epoch really has, such as 0.1 for a trial.
        length_window: so many batches are sorted by length together, where samples have lengths; 0 sorts none.
        augment: augment(tree, seed, share, epoch) returns the tensors of a share to train on.
        virtual_ranks: the number of virtual ranks; 0 for none.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        passes: int = 1,
        fraction: float = 1.0,
        length_window: int = 0,
        augment: Callable[[Any, int, BatchShare, int], Any] = lambda tree, *_: tree,
        virtual_ranks: int = 0,
    ):
        samples = max(1, round(len(split) * passes * fraction))
        super().__init__(split, samples, batch_size, rank, world_size, virtual_ranks)
        self.seed = seed
        self.passes = passes
        self.augment = augment
        self.length_window = length_window
        self._counted: tuple[int, Order] | None = None  # an epoch's order with its sorted windows, for log lines
        self._order(self._keys(0)).check_room()

    def epoch(self, epoch: int, first_step: int = 0, end: int | None = None) -> Iterator[Batch]:
        """Yield the rank's shares of an epoch one after the other. The arguments are those of steps()."""
        for shares in self.steps(epoch, first_step, end):
            yield from shares

    def steps(self, epoch: int, first_step: int = 0, end: int | None = None) -> Iterator[list[Batch]]:
        """Yield, for each step of an epoch, the list of this rank's shares of the global batch, augmented.

        Without virtual ranks, the list has one share. With them, it has one for each of the rank's virtual ranks that
        has samples. A rank without samples in a step gets a share with a sample of another rank, marked as borrowed: it
        counts for nothing. If self.is_even is set, borrowed shares are added until all ranks have equally many. The
        epoch's last global batch may be short.

        Args:
            epoch: the number of the epoch, from 0.
            first_step: the first step to yield, from 0.
            end: the step to stop before; None is the epoch's end.

        Raises:
            DataError: A sample cannot be read, or does not fit the others. This rank alone raises this error.
            DownloadError: The storage fails to deliver a block. This rank alone raises this error.
            InputError: A block cannot be written to the node's disk. This rank alone raises this error.
        """
        for step, shares in self._fetch(self._make_order(epoch), range(len(self))[first_step:end]):
            seed, other = (derive_key(use, self.seed, epoch, step) for use in (Use.STEP, Use.AUGMENTATION))
            yield [Batch(self.augment(tree, other, share, epoch), share, seed) for tree, share in shares]

    def count_tokens(self, epoch: int, first_step: int, end: int) -> int:
        """Return the sum of the lengths of all ranks' samples in an epoch's steps from first_step to before end.

        Padding does not count. Nothing is exchanged. Call it only if the split has lengths.
        """
        lengths = get_lengths(self.split)
        assert lengths
        positions = torch.arange(self.samples_until(first_step), self.samples_until(end))
        if self._counted is None or self._counted[0] != epoch:
            self._counted = epoch, self._make_order(epoch)
        return int(lengths.each[self._counted[1].at(positions)].sum())

    def _make_order(self, epoch: int) -> Order:
        """Return the shuffled order of an epoch's samples. Epochs are numbered from 0.

        If samples have lengths and length_window is not 0, the samples of a batch have similar lengths: the samples of
        each length_window batches are sorted by length and cut into batches, and the batches are shuffled.
        """
        keys = self._keys(epoch)
        lengths = get_lengths(self.split)
        order = self._order(keys, lambda step: (keys[0], self._computed(step).start))
        if lengths and self.length_window:
            key = derive_key(Use.LENGTHS, self.seed, epoch)
            return SimilarLengths(order, lengths.each, self.samples, self.batch_size, self.length_window, key)
        return order

    def _keys(self, epoch: int) -> list[int]:
        return [derive_key(Use.PASS, self.seed, epoch, number) for number in range(self.passes)]


class EvaluationBatches(_Batches):
    """A rank's shares of the global batches of the whole test or validation split. No sample comes twice.

    Args:
        split: the samples.
        batch_size: samples of a global batch.
        rank: this rank.
        world_size: the number of ranks.
        mixed: whether the samples are shuffled, always in the same way.
        virtual_ranks: their number; 0 for none.
    """

    def __init__(
        self, split: Split, batch_size: int, rank: int, world_size: int, mixed: bool = False, virtual_ranks: int = 0
    ):
        super().__init__(split, len(split), batch_size, rank, world_size, virtual_ranks)
        self.is_mixed = mixed
        self.order = self._order([derive_key(Use.TEST_ORDER) if mixed else None])
        self.order.check_room()

    def __iter__(self) -> Iterator[Batch]:
        for shares in self.steps():
            yield from shares

    def steps(self) -> Iterator[list[Batch]]:
        """Yield, for each step, the list of this rank's shares of the global batch, as TrainBatches.steps() does."""
        for step, shares in self._fetch(self.order, range(len(self))):
            yield [Batch(tree, share, derive_key(Use.TEST_STEP, step)) for tree, share in shares]

    def whole(self) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Yield, for each global batch, the indices of all its samples, and which of them this rank evaluates.

        Yields:
            (n,) int64, the indices in the split; and (start, stop): this rank evaluates the samples at
            indices[start:stop], which may be none.
        """
        for step in range(len(self)):
            start, stop = self.samples_until(step), self.samples_until(step + 1)
            own = self.own(step)
            yield self.order.at(torch.arange(start, stop)), (own.start - start, own.stop - start)
