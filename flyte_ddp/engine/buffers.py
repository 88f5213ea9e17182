"""A network's buffers, which forward passes change: copies to restore, and rank 0's values for all ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flyte_ddp.engine import collectives
from flyte_ddp.errors import InputError


class Buffers:
    """The buffers of a network by name, even those that a forward pass replaces: `self.mean = 0.9 * self.mean`."""

    def __init__(self, model: nn.Module, moving: Iterable[str] = ()):
        """Find the buffers.

        Args:
            model: the network.
            moving: the names of frozen weights that forward passes change, too. They are copied and broadcast with the
                buffers.
        """
        names = [name for name, _ in model.named_buffers()]
        owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]  # once: it takes a while
        self._places = [(name, owner, name.rpartition(".")[2]) for name, owner in zip(names, owners, strict=True)]
        self._first = {name: (buffer, buffer.shape) for name, buffer in self.now().items()}
        self._saved = {*model.state_dict()}
        self._moving = [model.get_parameter(name) for name in moving]

    def now(self) -> dict[str, Tensor]:
        found = ((name, getattr(owner, own_name)) for name, owner, own_name in self._places)
        return {name: buffer for name, buffer in found if buffer is not None}

    def copy(self) -> "BufferCopy":
        """Return a copy of the buffers as they are now, whose put_back() restores them in the network."""
        return BufferCopy(self._places, self.now(), self._moving)

    def broadcast(self, may_change_shape: bool = False) -> None:
        """Overwrite the buffers, and the frozen weights that forward passes change, with rank 0's; a collective.

        A buffer that is in no state_dict, and no longer has its first shape, is a cache: it stays as it is on each
        rank.

        Args:
            may_change_shape: whether a buffer of the state_dict may have another shape than at first, the same on all
                ranks. Torch's quantization changes shapes in the first batch.

        Raises:
            InputError: A buffer of the state_dict is None, or has another shape than at first without may_change_shape.
        """
        now = self.now()
        for name, (first, first_shape) in self._first.items():
            shape = now[name].shape if name in now else None
            is_saved = name in self._saved
            if shape == first_shape or (is_saved and may_change_shape and shape is not None):
                continue
            if is_saved:
                raise InputError(
                    f"the buffer {name} must keep its shape, or no checkpoint could be loaded, got "
                    f"{tuple(shape or ())} after {tuple(first_shape)}: create it in __init__ with the shape that it "
                    "will have"
                )
            now[name] = first if first.shape == first_shape else first.new_zeros(first_shape)
        collectives.broadcast_in_place((*now.values(), *self._moving))


class BufferCopy:
    """A copy of a network's buffers."""

    def __init__(self, places: list[tuple[str, nn.Module, str]], buffers: dict[str, Tensor], moving: Iterable[Tensor]):
        self._places = places
        self._buffers = buffers
        self._values = [(tensor, tensor.clone()) for tensor in (*buffers.values(), *moving)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the values of all tensors, and put buffers that a forward pass has replaced back into the network."""
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
