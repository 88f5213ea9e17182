"""Where a rank's samples stand in the global batch, and how it gets hold of the others'."""

from dataclasses import dataclass
from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor, distributed


@dataclass
class Share:
    """Where in the global batch the samples stand that this rank is at. All layers of a network share one of these.

    Attributes:
        first: position of the rank's first sample.
        count: its samples.
        size: samples of the whole global batch.
        alone: that no other ranks take part, and nothing is to be remembered: a trial.
        stand_in: for gather_rows, where alone; without one, the rank's own rows are all there are.
    """

    first: int = 0
    count: int = 0
    size: int = 0
    alone: bool = False
    stand_in: Optional[Callable[[Tensor], Tensor]] = None


def gather_rows(mine: Tensor, share: Share) -> Tensor:
    """(N, ...) of the global batch from each rank's (n, ...); a collective, which carries gradients back."""
    if share.alone:
        return share.stand_in(mine) if share.stand_in else mine
    return _GatherRows.apply(mine, share.first, share.size)


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
        distributed.all_reduce(gradient)  # each rank's loss has its own
        return gradient[ctx.first : ctx.first + ctx.count], None, None
