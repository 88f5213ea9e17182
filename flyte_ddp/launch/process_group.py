"""The process group of all ranks, with a time-out. It is destroyed again if all goes well."""

import itertools
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment, World, default_variable
from flyte_ddp.launch.phases import STARTING, Timeouts
from flyte_ddp.settings import RunOptions

RENDEZVOUS = itertools.count()  # numbers this process's rendezvous, which all ranks go through in the same order
_left: Any = None  # the group of a block that has raised
_stores: dict[str | None, Store] = {}  # this process's first store for each port
BEYOND_SECONDS = 60.0  # a collective waits so much longer than the launcher, which can then still query hanging ranks


@contextmanager
def process_group(
    environment: Environment, timeouts: Timeouts | RunOptions | float, store: Store | None = None
) -> Iterator[torch.device]:
    """Create torch's default process group while the block runs, and yield this rank's device; a context manager.

    All ranks must enter the block. On a GPU, the device becomes torch's current one. The end of the block destroys the
    group. If the block raises, the group stays until this process enters the next such block.

    A collective times out BEYOND_SECONDS after the longest of the timeouts. Before that, the launcher ends the ranks.

    Args:
        environment: this rank's environment.
        timeouts: the timeouts by phase, the run's options that have them, or one number of seconds for all phases.
        store: the store that meet() has returned; None to call meet() here.

    Raises:
        InputError: The backend is gloo, and GLOO_SOCKET_IFNAME names a network interface that this host does not have.
        Exception: What torch raises if a rank does not come in time.
    """
    global _left
    if _left is not None and _left is distributed.group.WORLD:
        _left = None
        distributed.destroy_process_group()  # a script of torchrun may go on after an error
    device = torch.device(environment.world.device)
    if device.type == "cuda":
        device = torch.device("cuda", environment.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if environment.world.backend == "gloo":
        _check_interfaces()
    limits = Timeouts.of(timeouts)
    rank = environment.rank
    size = environment.world.size
    with _off_network(environment.world):
        distributed.init_process_group(
            environment.world.backend,
            store=store or meet(environment, limits),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=max(limits) + BEYOND_SECONDS),
            device_id=device if environment.world.backend == "nccl" else None,
        )
    try:
        yield device
    except BaseException:
        _left = distributed.group.WORLD
        raise
    distributed.destroy_process_group()


def _check_interfaces() -> None:
    """Raise InputError if GLOO_SOCKET_IFNAME names a network interface that this host does not have.

    gloo's own error looks like the loss of another rank.
    """
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = {name for _, name in socket.if_nameindex()}
    missing = [name for name in asked.split(",") if name and name not in known]
    if missing:
        raise InputError(
            f"GLOO_SOCKET_IFNAME must name network interfaces of {platform.node()} ({', '.join(sorted(known))}), got "
            f"{asked!r}: change it, or unset it"
        )


def gloo_group(world: World, ranks: Sequence[int]) -> Any:
    """Return another process group, of these ranks, for collectives of objects in a thread beside training.

    All ranks of the default group call it. Its collectives wait for up to a day: a hang is noticed in training itself.
    """
    with _off_network(world):
        return distributed.new_group(ranks, timeout=timedelta(days=1), backend="gloo")


def _off_network(world: World) -> AbstractContextManager[None]:
    """Return a context manager in which gloo uses the loopback interface if all ranks are on one host.

    The network could make gloo hang. With ranks on several hosts, or if the user has set GLOO_SOCKET_IFNAME, nothing
    changes.
    """
    if world.size > world.local_size:
        return nullcontext()
    return default_variable("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")


def meet(environment: Environment, timeouts: Timeouts) -> Store:
    """Return a new torch store that all ranks share, through which they then set up one process group.

    All ranks must call this function, equally often and in the same order. The call may wait for the other ranks. If a
    rank does not come within the timeout for a start plus BEYOND_SECONDS, torch raises an error, in this call or when
    the store is used.

    Args:
        environment: this rank's environment.
        timeouts: the timeouts by phase.
    """
    size = environment.world.size
    scheme, _, path = environment.init_method.partition("://")
    timeout = timedelta(seconds=timeouts.seconds(STARTING) + BEYOND_SECONDS)
    if scheme == "file":  # the path is no URL, in which torch would take a "#" or "?" for the path's end
        store: Store = FileStore(path, size)
        store.set_timeout(timeout)
    else:
        store = next(rendezvous(environment.init_method, environment.rank, size, timeout=timeout))[0]
        # Without torchrun's agent, rank 0 serves the store as long as it holds one. It must not stop between two
        # trainings: another rank may be at the second one already.
        _stores.setdefault(os.environ.get("MASTER_PORT"), store)
    # The store outlives a process group, so the next group would find the last one's addresses
    return PrefixStore(f"rendezvous {next(RENDEZVOUS)}", store)
