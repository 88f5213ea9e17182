"""A rank's share of the global batch, and the exchange of rows between ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass
class BatchShare:
    """The samples of the global batch that this rank is working on.

    A batch can be so short that a rank gets no samples. The rank then computes samples that belong to another rank,
    because no code must ever see an empty batch. Borrowed samples count for nothing.

    Attributes:
        first: position of the rank's first sample in the global batch.
        count: the number of samples that the rank computes, at least 1.
        size: the number of samples in the whole global batch.
        borrowed: whether the samples that the rank computes are another rank's.
        part: the part of the global batch: with virtual ranks the virtual rank's number, otherwise the rank's.
        alone: whether the samples are computed without the other ranks, as in a trial or for predictions.
            Recipe.all_gather then returns the rank's own rows.
        stand_in: the function that Recipe.all_gather calls in place of the exchange, in trials and with virtual ranks.
    """

    first: int = 0
    count: int = 0
    size: int = 0
    borrowed: bool = False
    part: int = 0
    alone: bool = False
    stand_in: Callable[[Tensor], Tensor] | None = None

    def own(self, rows: Tensor) -> Tensor:
        """Return the rows of the rank's own samples: all rows, or (0, ...) if the samples are borrowed."""
        return rows[:0] if self.borrowed else rows


class GatherRows(torch.autograd.Function):
    """An all-gather of the global batch's rows with gradients, which are added up over all ranks for each row.

    Each rank sends equally many rows; padding fills up ranks that have one row less.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, size: int) -> Tensor:
        most, slots = _find_slots(size, local.device)
        ctx.arguments = len(local), size
        gathered = local.new_empty(distributed.get_world_size() * most, *local.shape[1:])
        distributed.all_gather_into_tensor(_bytes(gathered), _bytes(_padded(local, most, slice(len(local)))))
        return gathered[slots]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AddRows.apply(gradient, *ctx.arguments), None


class _AddRows(torch.autograd.Function):
    """A reduce-scatter that adds up all ranks' rows and gives each rank its own rows of the sum.

    _AddRows is the gradient of GatherRows, and GatherRows is the gradient of _AddRows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, size: int) -> Tensor:
        most, slots = _find_slots(size, rows.device)
        ctx.size = size
        local = rows.new_empty(most, *rows.shape[1:])
        distributed.reduce_scatter_tensor(local, _padded(rows, distributed.get_world_size() * most, slots))
        return local[:count]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return GatherRows.apply(gradient, ctx.size), None, None


def _bytes(rows: Tensor) -> Tensor:
    """View the rows as bytes, because some backends cannot send numbers of all types."""
    return rows.view(-1).view(torch.uint8)


def _padded(rows: Tensor, size: int, slots: slice | Tensor) -> Tensor:
    """Return (size, ...) zeros with the rows at these slots."""
    padded = rows.new_zeros(size, *rows.shape[1:])
    padded[slots] = rows
    return padded


def _find_slots(size: int, device: torch.device) -> tuple[int, Tensor]:
    """Return how many rows each rank sends in a gather, and where the global batch's rows are among all rows sent.

    The function sends nothing. All ranks send equally many rows: a rank that has one row less adds a row of padding.

    Args:
        size: the number of rows of the global batch.
        device: the device for the result.

    Returns:
        The number of rows that each rank sends, with padding. And a tensor (size,) int64: for each row of the global
        batch, its index among the rows of rank 0, rank 1 and so on.
    """
    world_size = distributed.get_world_size()
    rows = torch.arange(size, device=device)
    ranks = rows * world_size // size  # batches.rank_slice divides the batch like this
    most = -(-size // world_size)
    return most, ranks * most + rows - -(-size * ranks // world_size)
