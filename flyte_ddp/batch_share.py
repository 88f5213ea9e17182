"""A rank's share of the global batch, and how it gets the other ranks' rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass
class BatchShare:
    """The samples of the global batch that this rank is working on. All layers of a network share one of these.

    Where a short batch leaves nothing for this rank, it computes a sample of another rank's like that rank, so that no
    code ever sees an empty batch; what is borrowed counts for nothing.

    Attributes:
        first: position of the rank's first sample.
        count: the number of samples that the rank computes, at least 1.
        size: the number of samples in the whole global batch.
        borrowed: whether the samples that the rank computes are another rank's.
        part: which of the global batch's parts it is: with virtual ranks one of theirs, otherwise the rank's.
        alone: whether this is a trial without the other ranks, which must leave no trace; gather_rows returns the
            rank's own rows then.
        stand_in: what gather_rows calls in place of the other ranks: in trials, and with virtual ranks.
    """

    first: int = 0
    count: int = 0
    size: int = 0
    borrowed: bool = False
    part: int = 0
    alone: bool = False
    stand_in: Callable[[Tensor], Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> "BatchShare":
        return self  # copies of a layer share it, too

    def own(self, rows: Tensor) -> Tensor:
        """The rows of the rank's own samples: all, or (0, ...) of borrowed ones."""
        return rows[:0] if self.borrowed else rows


def gather_rows(local: Tensor, share: BatchShare) -> Tensor:
    """(N, ...) of the global batch from each rank's (n, ...); a collective, which carries gradients back."""
    if share.stand_in:
        return share.stand_in(local)
    if share.alone:
        return local
    return _GatherRows.apply(share.own(local), share.size)


class _GatherRows(torch.autograd.Function):
    """Ranks exchange equally many rows, the last of which is padding where the batch does not divide evenly."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, size: int) -> Tensor:
        most, slots = _places(size, local.device)
        ctx.arguments = len(local), size
        gathered = local.new_empty(distributed.get_world_size() * most, *local.shape[1:])
        distributed.all_gather_into_tensor(_bytes(gathered), _bytes(_padded(local, most, slice(len(local)))))
        return gathered[slots]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AddRows.apply(gradient, *ctx.arguments), None


class _AddRows(torch.autograd.Function):
    """The sum of all ranks' rows, of which each gets its own: the gradient of _GatherRows, as that is of this."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, size: int) -> Tensor:
        most, slots = _places(size, rows.device)
        ctx.size = size
        local = rows.new_empty(most, *rows.shape[1:])
        distributed.reduce_scatter_tensor(local, _padded(rows, distributed.get_world_size() * most, slots))
        return local[:count]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _GatherRows.apply(gradient, ctx.size), None, None


def _bytes(rows: Tensor) -> Tensor:
    """Backends cannot send numbers of all types."""
    return rows.view(-1).view(torch.uint8)


def _padded(rows: Tensor, size: int, slots: slice | Tensor) -> Tensor:
    padded = rows.new_zeros(size, *rows.shape[1:])
    padded[slots] = rows
    return padded


def _places(size: int, device: torch.device) -> tuple[int, Tensor]:
    """Return how many rows each rank sends, and (size,) int64: where each row of the global batch is among them."""
    world_size = distributed.get_world_size()
    rows = torch.arange(size, device=device)
    ranks = rows * world_size // size  # see batches.rank_slice
    most = -(-size // world_size)
    return most, ranks * most + rows - -(-size * ranks // world_size)
