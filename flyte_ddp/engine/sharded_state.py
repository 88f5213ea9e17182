"""The state of a training whose network is sharded, as a checkpoint has it: whole tensors, of which a rank has rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from flyte_ddp.engine.sharding import is_shard, local
from flyte_ddp.engine.torch_compat import pytree


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's rows of a tensor of this shape."""

    rows: Tensor
    shape: torch.Size

    def gathered(self, device: torch.device) -> Tensor | None:
        """The whole tensor, in rank 0's memory; None on the others. A collective by way of the device."""
        size, is_first = distributed.get_world_size(), distributed.get_rank() == 0
        padded = torch.zeros(-(-self.shape[0] // size), *self.shape[1:], dtype=self.rows.dtype, device=device)
        padded[: len(self.rows)] = self.rows
        parts = [torch.empty_like(padded) for _ in range(size)] if is_first else None
        sent = [part.view(-1).view(torch.uint8) for part in parts] if parts else None
        distributed.gather(padded.view(-1).view(torch.uint8), sent)  # not all types can be sent
        if not parts:
            return None
        counts = [len(range(*rows_of(self.shape[0], rank, size))) for rank in range(size)]
        return torch.cat([part[:count].cpu() for part, count in zip(parts, counts, strict=True)])


def rows_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """First and last row, exclusive, of a rank's part of so many rows, as fully_shard cuts them."""
    most = -(-count // size)
    return min(rank * most, count), min((rank + 1) * most, count)


def gathered(content: Any, device: torch.device) -> Any:
    """The content with the whole tensor for each Shard, on rank 0; a collective if there are any."""
    found: dict[int, Tensor | None] = {}

    def whole(shard: Shard) -> Tensor | None:
        if id(shard) not in found:  # tied weights have one
            found[id(shard)] = shard.gathered(device)
        return found[id(shard)]

    return pytree.tree_map_only(Shard, whole, content)


class Layout:
    """Which tensors of a training's state are sharded; none if the network is not."""

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        """optimizer: of the sharded weights, not yet of this rank's rows."""
        weights = model.state_dict(keep_vars=True)
        self._weights = {name: weight for name, weight in weights.items() if is_shard(weight)}
        updated = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._updated = {number: weight for number, weight in enumerate(updated) if is_shard(weight)}

    def _weight(self, path: tuple[Any, ...]) -> Tensor | None:
        """That the place in the state belongs to, if it is sharded."""
        match [getattr(key, "key", None) for key in path]:
            case ["model" | "average", str(name)] | ["choice", "weights", str(name)]:
                return self._weights.get(name)
            case ["optimizer", "state", int(number), _]:
                return self._updated.get(number)
        return None

    def marked(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state, with a Shard for what is sharded, one for all names of tied weights."""
        made: dict[tuple[Any, ...], Shard] = {}

        def mark(path: tuple[Any, ...], value: Any) -> Any:
            weight = self._weight(path) if isinstance(value, Tensor) else None
            if weight is None or not value.ndim:  # an optimizer's number of steps
                return value
            key = path if path[0].key == "optimizer" else (path[0], id(weight))
            return made.setdefault(key, Shard(local(value), weight.shape))

        found: dict[str, Any] = pytree.tree_map_with_path(mark, state) if self._weights else state
        return found

    def mine(self, path: tuple[Any, ...], whole: Tensor) -> Tensor:
        """This rank's rows of a tensor of the state."""
        if self._weight(path) is None or not whole.ndim:
            return whole
        first, last = rows_of(len(whole), distributed.get_rank(), distributed.get_world_size())
        return whole[first:last]


def fitted(values: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """The weights of a network, of sharded ones this rank's rows, as its load_state_dict takes them."""
    own = network.state_dict()
    return {name: _as_shard(value, own[name]) if is_shard(own.get(name)) else value for name, value in values.items()}


def _as_shard(rows: Tensor, own: Any) -> Tensor:
    from torch.distributed.tensor import DTensor  # a slow import, which others do without

    placed = rows.to(own.device)
    return DTensor.from_local(
        placed, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
