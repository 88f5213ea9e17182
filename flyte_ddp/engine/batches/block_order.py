"""The order of an epoch over blocks, which follows from the epoch's key, so that no list of samples is stored.

1. The blocks are permuted and laid end to end, and that row of samples is cut into streams, spans of equal length.
2. A stream is read from its first sample to its last, every second one backwards. So a block that is cut in two is at
the end of both its streams, or at the beginning of both, and needed during one stretch of time.
3. Within a stream, each `window` successive samples are shuffled.
4. The epoch takes a sample of each stream in turn. The samples of a batch are sorted by stream, so that a rank's
contiguous share of it is a few whole streams, and a node reads about its own part of the data.

Memory and time are in proportion to the blocks for an epoch, and to the batch for a step.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.engine.batches.order import shuffled
from flyte_ddp.random_numbers import Use, derive_key


@dataclass(frozen=True)
class Uses:
    """The blocks that some streams need, and when, in the order of their first use.

    Attributes:
        blocks: (n,) int64, each once.
        first, last: (n,) int64, the steps between which each block is needed, both included.
    """

    blocks: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def also(self, blocks: np.ndarray, step: int) -> "Uses":
        """Return a copy of these uses, extended by blocks that are needed in a step.

        If the uses have a block already, the step becomes its last step. A new block has it as first and last step.

        Args:
            blocks: (k,) int64, the numbers of the blocks.
            step: a step that is not before the last step of any block.
        """
        new = np.setdiff1d(blocks, self.blocks)
        last = np.where(np.isin(self.blocks, blocks), step, self.last)
        steps = np.full(len(new), step)
        return Uses(*map(np.concatenate, ([self.blocks, new], [self.first, steps], [last, steps])))


@dataclass(frozen=True)
class BlockOrder:
    """The order of one pass over all samples, or of its beginning.

    Attributes:
        lengths: (blocks,) int64, samples of each block.
        key: the key of the epoch; with None, blocks and their samples come as they are.
        batch_size: samples of a batch, all ranks together.
        samples: the number of samples of the epoch.
        window, streams: as in Blocks.
    """

    lengths: np.ndarray
    key: int | None
    batch_size: int
    samples: int
    window: int
    streams: int

    def at(self, positions: Tensor) -> Tensor:
        """Return the indices, in the split, of the samples at these positions of the epoch.

        Positions are (n,) int64, ascending; the indices are (n,) int64, too.
        """
        places, streams = np.divmod(self._sort_batches(positions.numpy()), self.used_streams)
        if self.key is not None:
            places = self._shuffle_windows(places, streams)
        where = np.where(streams % 2 == 0, self._cuts[streams] + places, self._cuts[streams + 1] - 1 - places)
        indices = np.searchsorted(self._ends, where, side="right")
        firsts = (np.cumsum(self.lengths) - self.lengths)[self._blocks[indices]]
        return torch.from_numpy(firsts + where - self._starts[indices])

    def streams_at(self, positions: Tensor) -> np.ndarray:
        """Return which stream the sample at each of these positions is from: (n,) int64, ascending within a batch."""
        return self._sort_batches(positions.numpy()) % self.used_streams

    def uses(self, streams: range, steps: range) -> Uses:
        """Return the blocks that some streams need in some steps.

        Each block comes with the first and the last step of the whole epoch in which one of these streams needs it,
        even if that step is outside of `steps`. Samples are shuffled within windows of a stream, so a step that needs a
        sample needs all blocks of its window.

        Args:
            streams: the numbers of the streams. A stream is a span of the epoch's samples; each batch takes some of it.
            steps: the steps.

        Returns:
            The blocks, in the order of their first steps.
        """
        first = np.full(len(self._blocks), np.iinfo(np.int64).max)
        last = np.full(len(self._blocks), -1)
        for stream in streams:
            start, stop = self._cuts[stream], self._cuts[stream + 1]
            cut = slice(np.searchsorted(self._ends, start, "right"), np.searchsorted(self._starts, stop, "left"))
            begin = np.maximum(self._starts[cut], start) - start
            end = np.minimum(self._ends[cut], stop) - start
            if stream % 2:
                begin, end = stop - start - end, stop - start - begin
            # A window needs all of its blocks, from its first sample to its last
            begin = begin // self._window * self._window
            end = np.minimum(-(-end // self._window) * self._window, stop - start)
            first[cut] = np.minimum(first[cut], begin * self.used_streams + stream)
            last[cut] = np.maximum(last[cut], (end - 1) * self.used_streams + stream)
        first = first // self.batch_size
        last = np.minimum(last, self.samples - 1) // self.batch_size
        order = np.argsort(first, kind="stable")
        order = order[((first <= last) & (last >= steps.start) & (first < steps.stop))[order]]
        return Uses(self._blocks[order], first[order], last[order])

    @cached_property
    def used_streams(self) -> int:
        return min(self.streams, self.batch_size, int(self._ends[-1]))

    @property
    def _window(self) -> int:
        return 1 if self.key is None else self.window

    @cached_property
    def _blocks(self) -> np.ndarray:
        """Return the numbers of all blocks in the epoch's order, (blocks,) int64: permuted, or ascending without a key.

        When the blocks are laid end to end in this order, _starts and _ends say where each one begins and ends.
        """
        blocks = torch.arange(len(self.lengths))
        if self.key is not None:
            blocks = shuffled(blocks, len(blocks), derive_key(Use.BLOCKS, self.key))
        return blocks.numpy()

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths[self._blocks])

    @cached_property
    def _starts(self) -> np.ndarray:
        return self._ends - self.lengths[self._blocks]

    @cached_property
    def _cuts(self) -> np.ndarray:
        """Return where streams begin and end in the row of all blocks' samples, laid end to end, as int64.

        There are used_streams + 1 numbers. Stream k is from _cuts[k] to before _cuts[k + 1]. Streams that are a sample
        longer come first.
        """
        each, longer = divmod(int(self._ends[-1]), self.used_streams)
        streams = np.arange(self.used_streams + 1)
        return streams * each + np.minimum(streams, longer)

    def _sort_batches(self, positions: np.ndarray) -> np.ndarray:
        """Sort each batch by stream, and return the number of the sample at each of these positions of the epoch.

        Number k is the sample at place k // used_streams of stream k % used_streams: before sorting, the streams take
        turns. Sorting puts the samples of one stream next to each other in the batch.

        Args:
            positions: (n,) int64, positions in the epoch, ascending.

        Returns:
            (n,) int64, the numbers.
        """
        steps = np.split(positions, np.flatnonzero(np.diff(positions // self.batch_size)) + 1)
        return np.concatenate([self._sort_batch(step[0] // self.batch_size)[step % self.batch_size] for step in steps])

    def _sort_batch(self, step: int) -> np.ndarray:
        batch = np.arange(step * self.batch_size, min((step + 1) * self.batch_size, self.samples))
        return batch[np.argsort((batch % self.used_streams).astype(np.uint32), kind="stable")]

    def _shuffle_windows(self, places: np.ndarray, streams: np.ndarray) -> np.ndarray:
        """Shuffle samples within windows, and return which sample comes to each of these places in a stream.

        A window is a span of `window` successive places of one stream. The last window of a stream may be shorter.

        Args:
            places: (n,) int64, places in streams.
            streams: (n,) int64, the stream of each place.

        Returns:
            (n,) int64, the place of each of these samples in its stream before shuffling.
        """
        windows = places // self.window
        each = int(windows.max()) + 1
        distinct, inverse = np.unique(streams * each + windows, return_inverse=True)
        keys = [derive_key(Use.BLOCK_WINDOW, self.key or 0, *divmod(int(one), each)) for one in distinct]
        starts = windows * self.window
        sizes = np.minimum(self.window, self._cuts[streams + 1] - self._cuts[streams] - starts)
        return starts + shuffled(torch.from_numpy(places - starts), sizes, np.array(keys, np.uint64)[inverse]).numpy()
