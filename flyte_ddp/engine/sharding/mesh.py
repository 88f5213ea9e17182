"""Which ranks share the rows of a sharded network: all of them or, with hybrid sharding, those of each node, which then
has a copy of all rows.
"""

from typing import Any

from torch import distributed

from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.settings import RunOptions

_mesh: Any = None  # of the network that this process has sharded last, as its process group is the last one


def make_mesh(options: RunOptions, environment: Environment) -> Any:
    """The ranks as fully_shard takes them; a collective. InputError where hybrid sharding finds nodes that differ."""
    from torch.distributed.device_mesh import init_device_mesh  # a slow import, which others do without

    global _mesh
    world = environment.world
    nodes = _nodes(environment) if options.sharding == "hybrid" else 1
    shape, names = ((nodes, world.local_size), ("nodes", "ranks")) if nodes > 1 else ((world.size,), ("ranks",))
    _mesh = init_device_mesh(world.device, shape, mesh_dim_names=names)
    return _mesh


def _nodes(environment: Environment) -> int:
    places: list[Any] = [None] * environment.world.size
    distributed.all_gather_object(places, (environment.local_rank, environment.world.local_size))
    sizes = [size for _, size in places]
    if len({*sizes}) > 1:
        raise InputError(
            f"each node must have as many ranks as the others to shard within nodes, got {min(sizes)} on one and "
            f"{max(sizes)} on another: start as many on each, or set options.sharding to full, or to off"
        )
    if any(local_rank != rank % sizes[0] for rank, (local_rank, _) in enumerate(places)):
        raise InputError(
            "the ranks of a node must follow one another to shard within nodes, as torchrun numbers them, got other "
            "LOCAL_RANKs: start them so, or set options.sharding to full, or to off"
        )
    return int(environment.world.size // sizes[0])


def copies() -> int:
    """How many nodes have a copy of every row."""
    return _mesh.size(0) if _mesh is not None and _mesh.ndim == 2 else 1


def counterparts() -> Any:
    """The group of this rank and those with the same rows, that of the first node first."""
    return _mesh.get_group(0)
