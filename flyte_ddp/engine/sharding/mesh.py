"""The mesh of ranks that share the rows of a sharded network.

These are all ranks or, with hybrid sharding, those of each node, which then has a copy of all rows.
"""

from typing import Any

from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.settings import RunOptions

_mesh: Any = None  # the mesh of the network that this process sharded last, in its newest process group


def make_mesh(options: RunOptions, environment: Environment) -> Any:
    """Create torch's mesh of the ranks, by which fully_shard divides the rows of the weights; a collective.

    With hybrid sharding, the ranks of each node divide all rows; otherwise all ranks do. The mesh is stored for the
    other functions of this module, too.

    Returns:
        torch's DeviceMesh: (nodes, ranks of a node) with hybrid sharding on several nodes, otherwise (ranks,).

    Raises:
        InputError: With hybrid sharding, nodes have different numbers of ranks, or the ranks of a node are not numbered
            consecutively. All ranks raise it.
    """
    from torch.distributed.device_mesh import init_device_mesh  # this import is slow, and only sharding needs it

    global _mesh
    world = environment.world
    nodes = _count_nodes(environment) if options.sharding == "hybrid" else 1
    shape, names = ((nodes, world.local_size), ("nodes", "ranks")) if nodes > 1 else ((world.size,), ("ranks",))
    _mesh = init_device_mesh(world.device, shape, mesh_dim_names=names)
    return _mesh


def _count_nodes(environment: Environment) -> int:
    """Return the number of nodes, for sharding within each node; a collective.

    All ranks raise InputError if nodes have different numbers of ranks, or the ranks of a node are not numbered
    consecutively.
    """
    places = gather_values((environment.local_rank, environment.world.local_size))
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
    """Return how many copies of the rows there are: with hybrid sharding one on each node, otherwise one."""
    return _mesh.size(0) if _mesh is not None and _mesh.ndim == 2 else 1


def counterparts() -> Any:
    """Return the process group of the ranks with the same rows as this one, with hybrid sharding.

    The first node's rank comes first.
    """
    return _mesh.get_group(0)


def sharers() -> Any:
    """Return the process group of the ranks that share rows: with hybrid sharding those of a node, otherwise all."""
    return _mesh.get_group(_mesh.ndim - 1)
