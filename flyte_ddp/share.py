"""A rank's share of the global batch, and how it gets the other ranks' rows."""

from dataclasses import dataclass
from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor, distributed


@dataclass
class Share:
    """Which samples of the global batch this rank is working on. All layers of a network share one of these.

    Where a short batch leaves nothing for this rank, it computes a sample of another rank's like that rank, so that no
    code ever sees an empty batch; this borrowed sample counts for nothing.

    Attributes:
        first: position of the rank's first sample.
        count: the number of samples that the rank computes, at least 1.
        size: the number of samples in the whole global batch.
        borrowed: whether the sample that the rank computes is another rank's.
        alone: whether this is a trial without the other ranks, which must leave no trace.
        stand_in: what gather_rows calls if alone; without it, the rank's own rows are returned.
    """

    first: int = 0
    count: int = 0
    size: int = 0
    borrowed: bool = False
    alone: bool = False
    stand_in: Optional[Callable[[Tensor], Tensor]] = None

    def own(self, rows: Tensor) -> Tensor:
        """The rows of the rank's own samples: all, or (0, ...) of a borrowed sample."""
        return rows[:0] if self.borrowed else rows


def gather_rows(mine: Tensor, share: Share) -> Tensor:
    """(N, ...) of the global batch from each rank's (n, ...); a collective, which carries gradients back."""
    if share.alone:
        return share.stand_in(mine) if share.stand_in else mine
    return _GatherRows.apply(share.own(mine), share.first, share.size)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, first: int, size: int) -> Tensor:
        ctx.first, ctx.count = first, len(mine)
        everyones = mine.new_zeros(size, *mine.shape[1:])
        everyones[first : first + len(mine)] = mine
        distributed.all_reduce(everyones)  # the others' rows are zeros
        return everyones

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient)  # the sum of the gradients of all ranks' losses
        return gradient[ctx.first : ctx.first + ctx.count], None, None
