"""A split whose samples are in blocks: which blocks a batch needs, and its rows from their files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.data.blocks.blocks import Blocks, check_count, open_rows, to_tree
from flyte_ddp.engine.batches.arrays import to_tensor
from flyte_ddp.engine.batches.block_cache import BlockCache, Prefetcher, needed_bytes
from flyte_ddp.engine.batches.block_order import BlockOrder, Uses
from flyte_ddp.engine.batches.loading import prefetch
from flyte_ddp.engine.batches.order import shuffled
from flyte_ddp.engine.batches.sample_seeds import NOWHERE, Origin
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.random_numbers import Use, derive_key

SPREAD_BLOCKS = 4  # how many blocks spread() takes samples from, at least
HEADER_BYTES = 4096  # the header of a block's file, unless it has hundreds of arrays
BATCHES_AHEAD = 2

Computed = Callable[[int], slice]  # returns the positions of an epoch that this rank computes in a step


class BlockSplit:
    """A Split in blocks. Its samples are those of the first block, then those of the second, and so on."""

    remedy = "look at its host's way to the storage and at its disk, or raise threads of Blocks"

    def __init__(
        self,
        blocks: Blocks,
        name: str,
        cache: BlockCache,
        device: torch.device,
        pin_memory: bool = False,
        chosen: np.ndarray | None = None,
    ):
        """Open the cache, and fetch the first block, which shows the type of the rows; a collective.

        Args:
            blocks: the blocks.
            name: the name of the split.
            cache: the cache of blocks on the node's disk.
            device: the rank's device, which gets the tensors.
            pin_memory: whether batches for a GPU are copied to page-locked memory first.
            chosen: (n,) int64, the numbers of the blocks that the split consists of; None is all of them.
        """
        for attribute in ("window", "streams", "threads"):
            check_count(f"{attribute} of Blocks", getattr(blocks, attribute))
        cache.open()
        self.blocks = blocks
        self.name = name
        self.cache = cache
        self.device = device
        self.pins = pin_memory and device.type == "cuda"
        self.chosen = np.arange(len(blocks.lengths)) if chosen is None else chosen
        self.block_lengths = blocks.lengths[self.chosen]
        self.ends = np.cumsum(self.block_lengths)
        self.sizes = np.zeros_like(self.block_lengths)  # bytes of each block, unknown until the first block is here
        self._kept: set[int] = set()  # the blocks whose files fetch() has left for its next call
        self._keep({0})
        self.row = np.asarray(open_rows(self.path(0), int(self.block_lengths[0]), self.name_of(0)))[:0].copy()
        self.sizes = self.block_lengths * get_row_type(self.row).itemsize + HEADER_BYTES

    def __len__(self) -> int:
        return int(self.ends[-1])

    def find_blocks(self, samples: np.ndarray) -> np.ndarray:
        """Return which of the split's blocks, a place in `chosen`, has each of these samples; both are (n,) int64."""
        return np.searchsorted(self.ends, samples, side="right")

    def hold_out(self, fraction: float) -> "tuple[BlockSplit, BlockSplit]":
        """Divide the split's blocks into two splits: one to train on, and one to validate on.

        The same blocks are held out on every machine and for any settings.seed. Both splits have this split's name and
        cache, and fetch their first block at once.

        Args:
            fraction: the share of the blocks to hold out.

        Returns:
            The split to train on, and that of the held-out blocks.

        Raises:
            InputError: One of the two would have no block.
        """
        blocks = len(self.chosen)
        count = round(fraction * blocks)
        if not 0 < count < blocks:
            raise InputError(
                f"validation_fraction takes whole blocks and must leave one on either side of {blocks}, got "
                f"{fraction:g}: change it, write smaller blocks, or set has_validation"
            )
        mixed = self.chosen[shuffled(torch.arange(blocks), blocks, derive_key(Use.HELD_OUT)).numpy()]
        kept, held = np.sort(mixed[count:]), np.sort(mixed[:count])
        arguments = self.blocks, self.name, self.cache, self.device, self.pins
        return BlockSplit(*arguments, kept), BlockSplit(*arguments, held)

    def spread(self, count: int) -> Tensor:
        """Choose samples for a trial, spread evenly over a few blocks that are far apart.

        SPREAD_BLOCKS blocks are taken, or all if there are fewer; more, if these would have too few samples.

        Args:
            count: how many samples to choose.

        Returns:
            (count,) int64 indices, ascending. An index comes several times if the chosen blocks have fewer than `count`
            samples.
        """
        blocks = max(SPREAD_BLOCKS, int(-(-count // np.median(self.block_lengths))))
        chosen = np.unique(np.linspace(0, len(self.ends) - 1, min(blocks, len(self.ends)), dtype=np.int64))
        starts = self.ends - self.block_lengths
        samples = np.concatenate([np.arange(starts[one], self.ends[one]) for one in chosen])
        return to_tensor(samples[np.linspace(0, len(samples) - 1, count, dtype=np.int64)])

    def fetch(self, parts: Iterable[Tensor], origins: Iterable[Origin] = NOWHERE) -> Iterator[Any]:
        """Fetch the blocks of each part's samples, and yield the samples as a tree of tensors (n, ...) on the device.

        This is for a few samples, such as those of trials; an epoch reads by BlocksInOrder. The blocks stay in the
        cache for the next call. If the cache would overflow, blocks of earlier parts and calls are deleted.

        Args:
            parts: for each part its sample indices, (n,) int64, in any order.
            origins: not used, since blocks draw no random numbers.

        Raises:
            DataError: A block's file is damaged, or does not fit the others.
            DownloadError: The storage fails to deliver a block.
            InputError: A block cannot be written to the node's disk.
        """
        rows = BlockRows(self)
        for part in parts:
            self._keep(set(self.find_blocks(part.numpy()).tolist()))
            tree = rows.read_batch(part.numpy())
            yield pytree.tree_map(lambda leaf: to_tensor(leaf).to(self.device), tree)

    def path(self, block: int) -> Path:
        return self.cache.path(self._file(block))

    def bring(self, block: int) -> None:
        """Fetch a block, by its place in `chosen`, into the cache, unless it is there."""
        number = int(self.chosen[block])
        self.cache.fetch(self._file(block), lambda path: self.blocks.fetch(number, path))

    def drop(self, block: int) -> None:
        self.cache.delete(self._file(block))

    def forget(self) -> None:
        """Delete the blocks that fetch() has left in the cache."""
        while self._kept:
            self.drop(self._kept.pop())

    def _keep(self, blocks: set[int]) -> None:
        """Fetch blocks, and leave them in the cache. If it would overflow, those of earlier calls are deleted first."""
        if self.sizes[list(self._kept | blocks)].sum() > self.cache.budget:
            self.forget()
        for block in sorted(blocks):
            self.bring(block)
            self._kept.add(block)

    def _file(self, block: int) -> str:
        return f"{self.name}-{self.chosen[block]}"

    def name_of(self, block: int) -> str:
        return self.blocks.name(int(self.chosen[block]))


class BlocksInOrder:
    """The order of an epoch over a split in blocks, which are fetched ahead, and deleted after their last use.

    It implements batches.Order.

    Args:
        split: the samples.
        keys: the key of each pass; None leaves blocks and samples in the split's order.
        batch_size: the number of samples of a global batch.
        samples: the number of samples of the epoch.
        computed: computed(step) returns the slice of positions that this rank computes in that step.

    Raises:
        InputError: There is more than one pass.
    """

    def __init__(
        self, split: BlockSplit, keys: Sequence[int | None], batch_size: int, samples: int, computed: Computed
    ):
        if len(keys) > 1:
            raise InputError(f"passes_per_epoch must be 1 with Blocks, got {len(keys)}: raise epochs instead")
        blocks = split.blocks
        self.split = split
        self.order = BlockOrder(split.block_lengths, keys[0], batch_size, samples, blocks.window, blocks.streams)
        self.computed = computed
        self.at = self.order.at

    def uses(self, steps: range) -> Uses:
        """Return the blocks that this rank needs in some steps, with the first and last step that needs each.

        A batch takes its samples from several streams, each of which reads its own blocks in turn. A rank's samples
        come from a few neighbouring streams, which may change a little from step to step. A block that any of these
        streams reads counts as needed, even if this rank uses none of its samples.

        Args:
            steps: the steps. The first or last step of a block may lie outside of them.

        Returns:
            The blocks, in the order of their first steps.
        """
        # Which streams a share begins and ends with depends on where its batch begins, modulo the number of streams
        last_step, is_short = divmod(self.order.samples, self.order.batch_size)
        shares = [self.computed(step) for step in range(min(last_step, self.order.used_streams))]
        ends = [self.order.streams_at(torch.tensor([share.start, share.stop - 1])) for share in shares]
        streams = range(min((one for one, _ in ends), default=0), max((one for _, one in ends), default=-1) + 1)
        uses = self.order.uses(streams, steps)
        if not is_short or last_step not in steps:
            return uses
        # A short batch has fewer samples of each stream, so its shares may be of any streams
        share = self.computed(last_step)
        return uses.also(self.split.find_blocks(self.at(torch.arange(share.start, share.stop)).numpy()), last_step)

    def check_room(self) -> None:
        """Raise InputError if the cache is too small for the blocks that an epoch needs at a time."""
        uses = self.uses(range(-(-self.order.samples // self.order.batch_size)))
        self.split.cache.check(needed_bytes(uses, self.split.sizes[uses.blocks]))

    def fetch(self, parts: Iterable[Tensor], steps: range) -> Iterator[Any]:
        split = self.split
        uses = self.uses(steps)
        rows = BlockRows(self.split)
        prefetcher = Prefetcher(uses, split.sizes[uses.blocks], split.cache.budget, split.blocks.threads)
        gpu = torch.cuda.current_device() if split.pins else 0

        def read() -> Iterator[Any]:
            if split.pins:
                torch.cuda.set_device(gpu)  # a thread begins with the host's first GPU, whose memory pinning would take
            for step, part in zip(steps, parts, strict=True):
                prefetcher.wait(step, split.find_blocks(part.numpy()).tolist())
                tree = pytree.tree_map(to_tensor, rows.read_batch(part.numpy()))
                prefetcher.finish(step)
                yield pytree.tree_map(Tensor.pin_memory, tree) if split.pins else tree

        split.forget()
        prefetcher.start(split.bring, rows.drop)
        try:
            for tree in prefetch(read(), BATCHES_AHEAD):
                yield pytree.tree_map(lambda leaf: leaf.to(split.device, non_blocking=True), tree)
        finally:
            prefetcher.close()


class BlockRows:
    """A reader of samples from the files of their blocks, which stay open until they are dropped."""

    def __init__(self, split: BlockSplit):
        self.split = split
        self._opened: dict[int, np.ndarray] = {}  # (n, bytes of a row) uint8, from which rows are taken fastest

    def read_batch(self, samples: np.ndarray) -> Any:
        """Read samples from the files of their blocks, which must be in the cache.

        Args:
            samples: (n,) int64, the indices of the samples in the split, in any order.

        Returns:
            A tree of arrays (n, ...), in the order of `samples`.

        Raises:
            DataError: A block's file is damaged, has another number of rows than announced, or has rows of another
                dtype or shape than the first block.
        """
        split = self.split
        row = self.split.row
        blocks = split.find_blocks(samples)
        order = np.argsort(blocks, kind="stable")
        sorted_blocks = blocks[order]
        places = (samples - (split.ends - split.block_lengths)[blocks])[order]
        starts = [0, *(np.flatnonzero(np.diff(sorted_blocks)) + 1).tolist()]
        buffer = np.empty((len(samples), get_row_type(row).itemsize), np.uint8)
        for start, stop in zip(starts, [*starts[1:], len(samples)], strict=True):
            opened = self._open(int(sorted_blocks[start]))
            opened.take(places[start:stop], axis=0, out=buffer[start:stop], mode="clip")  # "raise" would copy
        rows = buffer.view(row.dtype).reshape(len(samples), *row.shape[1:])
        return to_tree(rows, np.argsort(order))

    def drop(self, block: int) -> None:
        """Close a block's file, and delete it from the cache."""
        self._opened.pop(block, None)  # a deleted file takes space for as long as it is open
        self.split.drop(block)

    def _open(self, block: int) -> np.ndarray:
        """Return a memory map of a block's rows, (samples, bytes of a row) uint8, which stays open for later calls.

        Raises:
            DataError: The block's file is damaged, has another number of rows than announced, or has rows of another
                dtype or shape than the first block.
        """
        if block not in self._opened:
            name = self.split.name_of(block)
            kind = get_row_type(self.split.row)
            rows = open_rows(self.split.path(block), int(self.split.block_lengths[block]), name)
            if get_row_type(rows) != kind:
                raise DataError(f"{name} has samples of {get_row_type(rows)}, where others have {kind}")
            self._opened[block] = np.asarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), -1)
        return self._opened[block]


def get_row_type(rows: np.ndarray) -> np.dtype:
    """Return the dtype of a row of an array, with the row's shape in it: two rows that differ in either differ."""
    return np.dtype((rows.dtype, rows.shape[1:])) if rows.shape[1:] else rows.dtype
