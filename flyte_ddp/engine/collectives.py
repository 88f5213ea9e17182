"""The exchanges of a few values among ranks. All ranks must call each function.

Tensors are sent as bytes, because some backends cannot send all types.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.torch_compat import broadcast_together


def broadcast_tensor(value: Tensor, device: torch.device, receivers: Any = None) -> Tensor:
    """Broadcast a tensor from a group's first rank, and return it on `device`; a collective of the group.

    Args:
        value: on the first rank, the tensor to send. On the others, a tensor of the same shape and dtype, which may be
            on torch's meta device. A contiguous tensor on `device` is overwritten.
        device: the device that sends and receives.
        receivers: the process group; by default all ranks.

    Returns:
        The first rank's tensor, contiguous. It may be `value` itself.
    """
    sent = (torch.empty_like(value, device=device) if value.is_meta else value.to(device)).contiguous()
    distributed.broadcast(sent.view(-1).view(torch.uint8), group=receivers, group_src=0)
    return sent


@torch.no_grad()
def broadcast_in_place(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors with rank 0's values; a collective.

    All ranks pass tensors of the same shapes and dtypes. The tensors need not be contiguous.
    """
    if distributed.get_world_size() == 1:
        return
    sent = [(tensor, tensor.detach().contiguous()) for tensor in tensors if tensor.numel()]
    broadcast_together([dense.view(-1).view(torch.uint8) for _, dense in sent])
    for tensor, dense in sent:
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)


def broadcast_value(value: Any) -> Any:
    """Broadcast rank 0's value, and return it."""
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


def gather_values(value: Any) -> list[Any]:
    """Gather a value from each rank, and return the values by rank."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def all_reduce_flags(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Return, for each flag, whether it is set on any rank."""
    counts = torch.tensor(flags, dtype=torch.float32, device=device)
    distributed.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]
