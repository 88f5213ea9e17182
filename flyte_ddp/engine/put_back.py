"""What forward passes change in a network, put back as it was."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def kept(model: nn.Module, moving: Iterable[Tensor] = ()) -> Callable[[], None]:
    """What puts back, whenever it is called, what forward passes have changed since: values, and buffers themselves,
    which `self.mean = 0.9 * self.mean` replaces. moving: weights that they change, too."""
    values = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *moving)]
    split = ((*name.rpartition("."), buffer) for name, buffer in model.named_buffers())
    places = [(model.get_submodule(owner), name, buffer) for owner, _, name, buffer in split]

    @torch.no_grad()
    def put_back() -> None:
        for tensor, value in values:
            tensor.copy_(value)
        for layer, name, buffer in places:
            if getattr(layer, name) is not buffer:
                setattr(layer, name, buffer)

    return put_back
