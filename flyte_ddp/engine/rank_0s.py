"""Rank 0's tensors, on all ranks. Each function is a collective. Tensors go as bytes, as not all types can be sent."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.torch_compat import broadcast_together


def broadcast(value: Tensor, device: torch.device, receivers: Any = None) -> Tensor:
    """Return the tensor of the first of the receivers, on the device.

    Args:
        value: the tensor to send; the other receivers have one like it, or a meta tensor.
        device: where the tensor is sent from, and received.
        receivers: a process group; by default all ranks.
    """
    sent = (torch.empty_like(value, device=device) if value.is_meta else value.to(device)).contiguous()
    distributed.broadcast(sent.view(-1).view(torch.uint8), group=receivers, group_src=0)
    return sent


@torch.no_grad()
def take(tensors: Iterable[Tensor]) -> None:
    """Give the tensors rank 0's values, many of them in one message."""
    if distributed.get_world_size() == 1:
        return
    sent = [(tensor, tensor.detach().contiguous()) for tensor in tensors if tensor.numel()]
    broadcast_together([dense.view(-1).view(torch.uint8) for _, dense in sent])
    for tensor, dense in sent:
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)
