"""The mesh of ranks that share the rows of a sharded network.

These are all ranks or, with hybrid sharding, those of each node, which then has a copy of all rows.
"""

from typing import Any

from torch import distributed

from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.settings import RunOptions

_mesh: Any = None  # the mesh of the network that this process sharded last, in its newest process group


def make_mesh(options: RunOptions, environment: Environment) -> Any:
    """Create the mesh of ranks that fully_shard takes. All ranks must call it.

    Raises:
        InputError: hybrid sharding finds nodes that differ.
    """
    from torch.distributed.device_mesh import init_device_mesh  # this import is slow, and only sharding needs it

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
    """Return how many nodes have a copy of every row."""
    return _mesh.size(0) if _mesh is not None and _mesh.ndim == 2 else 1


def counterparts() -> Any:
    """Return the group of this rank and those with the same rows. The first node's rank comes first."""
    return _mesh.get_group(0)
