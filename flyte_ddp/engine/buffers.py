"""A network's buffers, which forward passes change, put back as they were."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Buffers:
    """Of a network, by name: whichever tensors they are now, as `self.mean = 0.9 * self.mean` replaces one."""

    def __init__(self, model: nn.Module):
        names = [name for name, _ in model.named_buffers()]
        owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]  # once: it takes a while
        self._places = [(name, owner, name.rpartition(".")[2]) for name, owner in zip(names, owners, strict=True)]

    def now(self) -> dict[str, Tensor]:
        found = ((name, getattr(owner, own_name)) for name, owner, own_name in self._places)
        return {name: buffer for name, buffer in found if buffer is not None}

    def kept(self, moving: Iterable[Tensor] = ()) -> Callable[[], None]:
        """What puts back, whenever it is called, what forward passes have changed since: values, and the buffers
        themselves. moving: weights that they change, too."""
        before = self.now()
        values = [(tensor, tensor.clone()) for tensor in (*before.values(), *moving)]

        @torch.no_grad()
        def put_back() -> None:
            for tensor, value in values:
                tensor.copy_(value)
            for name, owner, own_name in self._places:
                if getattr(owner, own_name) is not before.get(name):
                    setattr(owner, own_name, before.get(name))

        return put_back
