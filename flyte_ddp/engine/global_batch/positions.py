"""Where a rank's samples are in what torch draws for the global batch, and which numbers are theirs."""

import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.global_batch.batch_norm import Waiting
from flyte_ddp.engine.global_batch.ghost_batch_norm import RunningStatistics
from flyte_ddp.engine.tracing_compat import divided, is_functionalizing, is_tracing
from flyte_ddp.errors import InputError
from flyte_ddp.random_numbers import Number

Shape = tuple[int, ...]
# (key, first, count, device): of the draw with this key the numbers from position first on
Numbers = Callable[[Number, Number, int, torch.device], Tensor]


class Layout(NamedTuple):
    """Where the samples are in what an operation draws.

    Attributes:
        dimension: of the samples; None for numbers that all samples share.
        each: rows per sample in that dimension.
        rest: the other dimensions.
    """

    dimension: int | None
    each: int
    rest: Shape

    @property
    def numbers(self) -> int:
        """For each sample."""
        return 0 if self.dimension is None else self.each * math.prod(self.rest)

    def fits(self, shape: Shape, count: int) -> bool:
        if self.dimension is None:
            return shape == self.rest
        rest = shape[: self.dimension] + shape[self.dimension + 1 :]
        return rest == self.rest and shape[self.dimension] == self.each * count


class Position(NamedTuple):
    """Of a draw: its layout, its key, and the position of its first element."""

    layout: Layout
    key: Number
    first: Number

    def draw(self, shape: Shape, device: torch.device, numbers: Numbers) -> Tensor:
        """numbers(key, first, count, device) for the shape, each sample's by its position."""
        drawn, layout = numbers(self.key, self.first, math.prod(shape), device), self.layout
        if not layout.dimension:
            return drawn.view(shape)
        return drawn.view(shape[layout.dimension], *layout.rest).movedim(0, layout.dimension)


class Draw(NamedTuple):
    """What a draw is of."""

    operation: str
    shape: Shape
    layout: Layout

    def with_lengths(self, length_of: Callable[[int], int]) -> "Draw":
        """length_of: what a length of a shape stands for."""
        dimension, each, rest = self.layout
        layout = Layout(dimension, length_of(each), tuple(map(length_of, rest)))
        return Draw(self.operation, tuple(map(length_of, self.shape)), layout)


class Trace:
    """Of a graph that torch compiles, which may run for other keys and other samples.

    Attributes:
        draws: in their order.
    """

    def __init__(self, inputs: Tensor | None = None):
        """inputs: (1 + draws,) int64 of the graph: the position of the rank's first sample, then the draws' keys. For
        draws beyond these, and with None, shapes alone are right."""
        self.inputs = inputs
        self.draws: list[Draw] = []

    def position(self, draw: Draw) -> Position:
        self.draws.append(draw)
        if self.inputs is None or len(self.draws) >= len(self.inputs):
            return Position(draw.layout, *torch.zeros(2, dtype=torch.int64))
        return Position(draw.layout, self.inputs[len(self.draws)], self.inputs[0] * draw.layout.numbers)


def leave_compiled() -> None:
    """Has torch call the operation that calls this as it is, between what it compiles before and after it."""
    if is_tracing():
        torch.empty(1).item()  # torch cannot compile what depends on a number


class Positions:
    """A network's random numbers and batch statistics as those of the global batch, for the samples of a share.

    The numbers of a sample depend on the step's seed, the number of the call and the sample's position alone. Each call
    takes its key from torch's generator, so that activation checkpointing, which sets that back, draws them again.

    Attributes:
        drawn: operation and shape of each draw of the block.
        digest: of these shapes without the samples, and of what is noted: the same on all ranks, or what they compute
            doesn't belong together.
        normalised: whether any batch was normalised.
        running: of the network that trains; None without groups of samples to normalise by.
        waiting: entered while the ranks exchange statistics.
        is_compiled: whether torch compiles the network by compiled_draws.py.
        trace: of the graph that it is compiling.
    """

    def __init__(self, share: BatchShare):
        self.share = share
        self.drawn: list[tuple[str, Shape]] = []
        self.digest = 0
        self.normalised = False
        self.running: RunningStatistics | None = None
        self.waiting: Waiting = nullcontext
        self.is_compiled = False
        self.trace: Trace | None = None
        self._layouts: dict[tuple[str, int], list[Layout]] = {}  # by operation and number of dimensions
        self._by_shape: dict[tuple[str, Shape, int], Layout] = {}

    def note(self, what: str) -> None:
        """All ranks have to note the same, in the same order."""
        self.digest = zlib.crc32(what.encode(), self.digest)

    def learn(self, whole: Sequence[tuple[str, Shape]], part: Sequence[tuple[str, Shape]], size: int) -> None:
        """Compares the draws for `size` samples with those for the share's part of them, to see where samples are."""
        if [operation for operation, _ in whole] != [operation for operation, _ in part]:
            return
        for (operation, all_rows), (_, rows) in zip(whole, part, strict=True):
            changed = [index for index, (a, b) in enumerate(zip(all_rows, rows, strict=False)) if a != b]
            if len(all_rows) != len(rows) or len(changed) > 1:
                continue
            index = changed[0] if changed else None
            if index is not None and (
                all_rows[index] % size or all_rows[index] // size != rows[index] / self.share.count
            ):
                continue
            each = 1 if index is None else all_rows[index] // size
            rest = rows if index is None else rows[:index] + rows[index + 1 :]
            layout, known = Layout(index, each, rest), self._layouts.setdefault((operation, len(rows)), [])
            if layout not in known:
                known.append(layout)
        self._by_shape.clear()

    def draw(self, operation: str, shape: Sequence[int], device: torch.device, numbers: Numbers) -> Tensor:
        """See Position.draw."""
        return self.position(operation, tuple(shape)).draw(tuple(shape), device, numbers)

    def position(self, operation: str, shape: Shape) -> Position:
        """Of the next call. To be asked for once by each, since this draws its key."""
        if is_tracing():
            return self._traced(operation, shape)
        wanted = operation, shape, self.share.count
        layout = self._by_shape.get(wanted) or self._by_shape.setdefault(wanted, self._layout(operation, shape))
        (key,) = self.keys([Draw(operation, shape, layout)]).tolist()
        return Position(layout, key, self.share.first * layout.numbers)

    def _traced(self, operation: str, shape: Shape) -> Position:
        """Of a call in what torch compiles, for shapes whose lengths may stand for any."""
        if not self.is_compiled:
            leave_compiled()
        if self.trace is None and is_functionalizing():
            raise InputError(
                f"{operation} must not be compiled by a torch.compile in the recipe beside options.compile, whose "
                "numbers are the whole batch's: leave one of them out"
            )
        try:
            draw = Draw(operation, shape, self._layout(operation, shape))
        except InputError:
            leave_compiled()  # so that it is raised outside
            raise
        return (self.trace or Trace()).position(draw)  # torch asks for shapes before there is a trace

    def keys(self, draws: Sequence[Draw]) -> Tensor:
        """(draws,) int64: of what is drawn next."""
        for draw in draws:
            self.drawn.append(draw[:2])
            self.note(repr(draw.layout))
        return torch.empty(len(draws), dtype=torch.int64).random_()

    def _layout(self, operation: str, shape: Shape) -> Layout:
        known, count = self._layouts.get((operation, len(shape)), []), self.share.count
        # Shapes that the probe has not seen have them as the operation's others, or else in the first dimension
        dimensions = {layout.dimension for layout in known} or {0}
        if len(dimensions) > 1:
            dimensions = {layout.dimension for layout in known if layout.fits(shape, count)}
        if len(dimensions) != 1:
            raise InputError(
                f"{operation} of shape {shape} may have the samples in more than one dimension, or in none, as this "
                f"rank's number of samples is {count}: choose batch_size so that each rank has at least 2 samples, in "
                "an epoch's last batch, too, and give all samples the same shape"
            )
        (index,) = dimensions
        if index is None or not shape or not count or shape[index] % count:
            return Layout(None, 1, shape)
        return Layout(index, divided(shape[index], count), shape[:index] + shape[index + 1 :])
