"""What forward passes change in a network, put back as it was."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def kept(model: nn.Module, moving: Mapping[str, Tensor]) -> Callable[[], None]:
    """What puts back, whenever it is called, what forward passes have changed since: values, and buffers themselves,
    which `self.mean = 0.9 * self.mean` replaces. moving: weights that they change, too, by name."""
    before = [(name, one, one.clone()) for name, one in (*model.named_buffers(), *moving.items())]

    @torch.no_grad()
    def put_back() -> None:
        for name, tensor, value in before:
            tensor.copy_(value)
            owner, _, own_name = name.rpartition(".")
            layer = model.get_submodule(owner)
            if getattr(layer, own_name) is not tensor:
                setattr(layer, own_name, tensor)

    return put_back
