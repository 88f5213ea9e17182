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
BEYOND_SECONDS = 60.0  # a collective waits so much longer than the launcher, which can then still query hanging ranks


@contextmanager
def process_group(
    environment: Environment, timeouts: Timeouts | RunOptions | float, store: Store | None = None
) -> Iterator[torch.device]:
    """Join all ranks, and yield this rank's device.

    A rank that fails leaves the group as it is: its process ends anyway.

    Args:
        environment: this rank.
        timeouts: how long the launcher waits for a sign of life before it ends the ranks; collectives wait a little
            longer.
        store: what meet() has returned, if it has been called.
    """
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
    yield device
    distributed.destroy_process_group()


def _check_interfaces() -> None:
    """Raise InputError for a network interface that does not exist: gloo's own error looks like the loss of a peer."""
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = {name for _, name in socket.if_nameindex()}
    missing = [name for name in asked.split(",") if name and name not in known]
    if missing:
        raise InputError(
            f"GLOO_SOCKET_IFNAME must name network interfaces of {platform.node()} ({', '.join(sorted(known))}), got "
            f"{asked!r}: change it, or unset it"
        )


def gloo_group(world: World, ranks: Sequence[int]) -> Any:
    """Create another group, of these ranks, for collectives of objects in a thread beside training.

    All ranks must call it.

    Its collectives wait for as long as the other ranks live. Training itself notices a hang.
    """
    with _off_network(world):
        return distributed.new_group(ranks, timeout=timedelta(days=1), backend="gloo")


def _off_network(world: World) -> AbstractContextManager[None]:
    """Keep gloo off the network while ranks of one host meet, because the network can make gloo hang."""
    if world.size > world.local_size:
        return nullcontext()
    return default_variable("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")


def meet(environment: Environment, timeouts: Timeouts) -> Store:
    """Wait for all ranks, and return a store that they share, for one process group."""
    size = environment.world.size
    (scheme, _, path) = environment.init_method.partition("://")
    timeout = timedelta(seconds=timeouts.seconds(STARTING) + BEYOND_SECONDS)
    if scheme == "file":  # the path is no URL, in which torch would take a "#" or "?" for the path's end
        store: Store = FileStore(path, size)
        store.set_timeout(timeout)
    else:
        store = next(rendezvous(environment.init_method, environment.rank, size, timeout=timeout))[0]
    # torchrun's store outlives a process group, so the next group would find the last one's addresses
    return PrefixStore(f"rendezvous {next(RENDEZVOUS)}", store)
