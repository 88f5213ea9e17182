"""The state of a training whose network is sharded, in a checkpoint's form: whole tensors, of which a rank has rows."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from flyte_ddp.engine.collectives import broadcast_value
from flyte_ddp.engine.sharding.mesh import copies
from flyte_ddp.engine.sharding.sharding import is_shard, local
from flyte_ddp.engine.torch_compat import pytree


@dataclass(frozen=True)
class Cut:
    """The division of sharded tensors into parts of consecutive rows, one for each rank.

    Rank 0 has the first part, and so on. With hybrid sharding the next node begins with the first part again. The ranks
    that together have all parts once, the first ones, write them to files.

    Attributes:
        parts: the number of parts.
        part: the number of this rank's part.
        writes: whether this rank is one of those that write.
    """

    parts: int
    part: int
    writes: bool

    def rows(self, count: int) -> tuple[int, int]:
        """Return the first and the last row, exclusive, of this rank's part of a tensor with so many rows."""
        return cut_rows(count, self.part, self.parts)


def cut() -> Cut:
    """Return the division of tensors over all ranks or, with hybrid sharding, over those of each node."""
    rank = distributed.get_rank()
    parts = distributed.get_world_size() // copies()
    return Cut(parts, rank % parts, writes=rank < parts)


@dataclass(frozen=True, eq=False)
class Shard:
    """A sharded tensor, as one rank knows it.

    Attributes:
        rows: this rank's rows of the tensor.
        shape: the shape of the whole tensor.
    """

    rows: Tensor
    shape: torch.Size

    def gather(self, room: Tensor | None, device: torch.device) -> None:
        """Copy the rows of all ranks into a whole tensor on rank 0; a collective.

        With hybrid sharding each node has all rows, and only the ranks of the first node send theirs.

        Args:
            room: the whole tensor on rank 0, on the CPU, which is overwritten; None on the other ranks.
            device: the device that sends and receives rows.
        """
        rank = distributed.get_rank()
        parts = cut().parts
        for owner in range(parts):
            first, last = cut_rows(self.shape[0], owner, parts)
            if rank == owner and first < last and room is None:
                distributed.send(_as_bytes(self.rows.to(device)), 0)
            elif room is not None and first < last:
                rows = self.rows if owner == 0 else torch.empty_like(room[first:last], device=device)
                if owner:
                    distributed.recv(_as_bytes(rows), owner)
                room[first:last].copy_(rows)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)  # backends cannot send all types


def cut_rows(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the first and the last row, exclusive, of one of the parts of `count` rows, as fully_shard cuts them.

    The last parts may be shorter, or empty.
    """
    most = -(-count // parts)
    return min(part * most, count), min((part + 1) * most, count)


def with_room(content: Any) -> Any:
    """Return `content` with an uninitialized tensor of the whole shape in place of each Shard.

    The same Shard gives the same tensor, as for tied weights. The tensors take no memory until they are written to. The
    content consists of nested dicts, lists and tuples.
    """
    rooms: dict[int, Tensor] = {}

    def room(shard: Shard) -> Tensor:
        return rooms.setdefault(id(shard), torch.empty(shard.shape, dtype=shard.rows.dtype))

    return pytree.tree_map_only(Shard, room, content)


def fill(path: Path | None, content: Any, device: torch.device) -> None:
    """Write the rows of all ranks into the sharded tensors of a file that rank 0 has written; a collective.

    Rank 0 maps the file and writes the rows of one rank after the other, so no tensor is ever whole in memory. If the
    content has no Shards, nothing is exchanged or written.

    Args:
        path: the file on rank 0, which torch.save has written with the result of with_room(content); None on the other
            ranks. Rank 0 passes None if it could not write the file, and then no rank sends anything.
        content: the content of the file, with this rank's Shards in place of the sharded tensors.
        device: the device that sends and receives rows.
    """
    leaves = pytree.tree_leaves(content)
    shards = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Shard)}
    if not shards or not broadcast_value(path is not None):
        return
    rooms: list[Any] = [None] * len(leaves)
    if path:
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            rooms = pytree.tree_leaves(torch.load(path, "cpu", weights_only=True, mmap=True))
    room_of = {id(leaf): room for leaf, room in zip(leaves, rooms, strict=True)}
    for key, shard in shards.items():
        shard.gather(room_of[key], device)


class Layout:
    """The knowledge of which tensors of a training's state are sharded; none if the network is not."""

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        """Find the sharded weights.

        Args:
            model: the network.
            optimizer: its optimizer, of the sharded weights: before update_own_rows() gives it this rank's rows.
        """
        weights = model.state_dict(keep_vars=True)
        self._weights = {name: weight for name, weight in weights.items() if is_shard(weight)}
        updated = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self._updated = {number: weight for number, weight in enumerate(updated) if is_shard(weight)}

    def _weight(self, path: tuple[Any, ...]) -> Tensor | None:
        """Return the sharded weight that an entry of the training's state belongs to; None if there is none.

        Such an entry is the weight's values, their moving average, their best values so far, or a tensor that the
        optimizer keeps for the weight.

        Args:
            path: the keys that lead to the entry, as pytree.tree_map_with_path gives them.
        """
        match [getattr(key, "key", None) for key in path]:
            case ["model" | "average", str(name)] | ["choice", "weights", str(name)]:
                return self._weights.get(name)
            case ["optimizer", "state", int(number), _]:
                return self._updated.get(number)
        return None

    def with_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with this rank's Shard in place of each sharded tensor. Nothing is copied.

        Tied weights share one Shard. A state without sharded tensors is returned as it is.

        Args:
            state: the training's state, or some of its entries.
        """
        made: dict[tuple[Any, ...], Shard] = {}

        def mark(path: tuple[Any, ...], value: Any) -> Any:
            weight = self._weight(path) if isinstance(value, Tensor) else None
            if weight is None or not value.ndim:  # an optimizer's number of steps has no rows
                return value
            key = path if path[0].key == "optimizer" else (path[0], id(weight))
            return made.setdefault(key, Shard(local(value), weight.shape))

        replaced: dict[str, Any] = pytree.tree_map_with_path(mark, state) if self._weights else state
        return replaced

    def local(self, path: tuple[Any, ...], whole: Any) -> Any:
        """Return this rank's rows of a tensor of the training's state, or the tensor itself if it is not sharded.

        Args:
            path: the keys that lead to the tensor, as pytree.tree_map_with_path gives them. The path tells whether the
                tensor is sharded.
            whole: the whole tensor, or a StoredTensor, which stands for a tensor in files and is cut without being
                read. A tensor without dimensions, such as an optimizer's number of steps, is never sharded.
        """
        if self._weight(path) is None or not whole.ndim:
            return whole
        first, last = cut().rows(len(whole))
        return whole[first:last]


def fitted(values: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return weights as the network's load_state_dict takes them: sharded ones, of which there are rows, as DTensor."""
    own = network.state_dict()
    return {name: _as_shard(value, own[name]) if is_shard(own.get(name)) else value for name, value in values.items()}


def _as_shard(rows: Tensor, own: Any) -> Tensor:
    from torch.distributed.tensor import DTensor  # this import is slow, and only sharding needs it

    placed = rows.to(own.device)
    return DTensor.from_local(
        placed, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
