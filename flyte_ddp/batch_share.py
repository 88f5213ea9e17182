"""A rank's share of the global batch, and how it gets the other ranks' rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass
class BatchShare:
    """Which samples of the global batch this rank is working on. All layers of a network share one of these.

    Where a short batch leaves nothing for this rank, it computes a sample (or group) of another rank's like that rank,
    so that no code ever sees an empty batch; what is borrowed counts for nothing.

    Attributes:
        first: position of the rank's first sample.
        count: the number of samples that the rank computes, at least 1.
        size: the number of samples in the whole global batch.
        borrowed: whether the samples that the rank computes are another rank's.
        norm_samples: if not 0, batch norm sees groups of this many samples, between which shares are cut.
        alone: whether this is a trial without the other ranks, which must leave no trace.
        stand_in: what gather_rows calls if alone; without it, the rank's own rows are returned.
    """

    first: int = 0
    count: int = 0
    size: int = 0
    borrowed: bool = False
    norm_samples: int = 0
    alone: bool = False
    stand_in: Callable[[Tensor], Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> "BatchShare":
        return self  # copies of a layer share it, too

    def own(self, rows: Tensor) -> Tensor:
        """The rows of the rank's own samples: all, or (0, ...) of borrowed ones."""
        return rows[:0] if self.borrowed else rows


def gather_rows(mine: Tensor, share: BatchShare) -> Tensor:
    """(N, ...) of the global batch from each rank's (n, ...); a collective, which carries gradients back."""
    if share.alone:
        return share.stand_in(mine) if share.stand_in else mine
    return _GatherRows.apply(share.own(mine), share.size, share.norm_samples or 1)


class _GatherRows(torch.autograd.Function):
    """Ranks exchange equally many rows, the last of which is padding where the batch does not divide evenly.

    unit: how many rows at least belong together.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, size: int, unit: int) -> Tensor:
        world_size = distributed.get_world_size()
        ctx.count, ctx.most = len(mine), -(-size // (unit * world_size)) * unit
        ctx.slots = _slots(size, unit, world_size, ctx.most, mine.device)
        everyones = mine.new_empty(world_size * ctx.most, *mine.shape[1:])
        distributed.all_gather_into_tensor(everyones, _padded(mine, ctx.most, slice(len(mine))))
        return everyones[ctx.slots]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        world_size = distributed.get_world_size()
        mine = gradient.new_empty(ctx.most, *gradient.shape[1:])  # the sum of the gradients of all ranks' losses
        distributed.reduce_scatter_tensor(mine, _padded(gradient, world_size * ctx.most, ctx.slots))
        return mine[: ctx.count], None, None


def _padded(rows: Tensor, size: int, slots: slice | Tensor) -> Tensor:
    padded = rows.new_zeros(size, *rows.shape[1:])
    padded[slots] = rows
    return padded


def _slots(size: int, unit: int, world_size: int, most: int, device: torch.device) -> Tensor:
    """(size,) int64: where each row of the global batch is among the ranks' rows with their padding."""
    rows, units = torch.arange(size, device=device), -(-size // unit)
    ranks = ((rows // unit + 1) * world_size - 1) // units  # see batches.rank_slice
    return ranks * most + rows - units * ranks // world_size * unit
