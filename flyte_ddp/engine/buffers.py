"""A network's buffers: how a forward pass leaves them, put back, or shared by rank 0."""

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.engine import rank_0s


class Buffers:
    """The buffers of a network by name, even those that a forward pass replaces: `self.mean = 0.9 * self.mean`."""

    def __init__(self, model: nn.Module):
        modules = [(f"{path}." if path else "", one) for path, one in model.named_modules()]  # once: it takes a while
        self._places = [(path + name, one, name) for path, one in modules for name in one._buffers]
        self._saved = {name for name, one, own_name in self._places if own_name not in one._non_persistent_buffers_set}
        self._device = next(model.parameters()).device
        self._first = self.now()

    def now(self) -> dict[str, Tensor]:
        found = ((name, getattr(owner, own_name)) for name, owner, own_name in self._places)
        return {name: buffer for name, buffer in found if buffer is not None}

    def kept(self, moving: Iterable[Tensor] = ()) -> "KeptBuffers":
        """Return a copy of the buffers as they are; moving: weights that forward passes change, too."""
        return KeptBuffers(self._places, self.now(), moving)

    def broadcast(self, moving: Iterable[Tensor] = ()) -> None:
        """Give all ranks the buffers of rank 0; a collective.

        They have its shapes, too. But a buffer that is in no state_dict and has another shape than at first is a cache,
        which may have grown on one rank alone, beside an attribute that says how far. As DistributedDataParallel does,
        this sends the first one in its place and leaves the cache as it is.
        """
        if distributed.get_world_size() > 1 and self._saved:
            self._take_shapes()
        now = self.now()
        for name in self._first.keys() - self._saved:
            if name not in now or now[name].shape != self._first[name].shape:
                now[name] = self._first[name]
        sent = self._saved | self._first.keys()
        rank_0s.take((*(now[name] for name, _, _ in self._places if name in sent and name in now), *moving))

    def _take_shapes(self) -> None:
        """Give the buffers of a state_dict the shapes that they have on rank 0."""
        shapes = [{name: (one.shape, one.dtype) for name, one in self.now().items() if name in self._saved}]
        distributed.broadcast_object_list(shapes, 0, device=self._device)
        for name, owner, own_name in self._places:
            if name in self._saved:
                here, first = getattr(owner, own_name), shapes[0].get(name)
                if first is None:
                    setattr(owner, own_name, None)
                elif here is None or (here.shape, here.dtype) != first:
                    setattr(owner, own_name, torch.empty(first[0], dtype=first[1], device=self._device))


class KeptBuffers:
    """A copy of a network's buffers."""

    def __init__(self, places: list[tuple[str, nn.Module, str]], buffers: dict[str, Tensor], moving: Iterable[Tensor]):
        self._places, self._buffers = places, buffers
        self._values = [(tensor, tensor.clone()) for tensor in (*buffers.values(), *moving)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the buffers themselves and their values."""
        for tensor, value in self._values:
            tensor.copy_(value)
        for name, owner, own_name in self._places:
            if getattr(owner, own_name) is not self._buffers.get(name):
                setattr(owner, own_name, self._buffers.get(name))

    @torch.no_grad()
    def replace_not_finite(self) -> None:
        """Restore each number that is no longer finite, such as the variance of batch norm's single value."""
        for tensor, value in self._values:
            if tensor.is_floating_point():
                tensor.copy_(torch.where(tensor.isfinite(), tensor, value))
