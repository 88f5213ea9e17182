"""Rank 0's tensors, on all ranks; all of it collectives. They go as bytes, as not all types can be sent."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed


def broadcast(value: Tensor, device: torch.device, receivers: Any = None) -> Tensor:
    """That of the first of the receivers, by default of all ranks, on the device; the others have the same, or a meta
    tensor."""
    sent = (torch.empty_like(value, device=device) if value.is_meta else value.to(device)).contiguous()
    distributed.broadcast(sent.view(-1).view(torch.uint8), group=receivers, group_src=0)
    return sent


@torch.no_grad()
def take(tensors: Iterable[Tensor]) -> None:
    """Gives the tensors rank 0's values."""
    for tensor in tensors:
        first = broadcast(tensor, tensor.device)
        if first is not tensor:  # which has been filled in place otherwise
            tensor.copy_(first)
