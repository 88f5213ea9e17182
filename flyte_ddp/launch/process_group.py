"""The ranks' meeting: one process group, with a time-out, cleaned up on every path that ends well."""

import itertools
import os
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Iterator

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from flyte_ddp.launch.environment import Environment

MEETINGS = itertools.count()  # of this process; its ranks come to all of them in the same order
BEYOND_SECONDS = 60.0  # that a collective outwaits the launcher, which can still ask all ranks where they hang


@contextmanager
def process_group(environment: Environment, timeout_seconds: float) -> Iterator[torch.device]:
    """Joins all ranks; yields this rank's device. A rank that fails leaves without goodbye: its process ends anyway.

    timeout_seconds: without a step, after which the launcher ends the ranks; collectives wait a little longer.
    """
    device = torch.device(environment.world.device)
    if device.type == "cuda":
        device = torch.device("cuda", environment.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rank, size, timeout = environment.rank, environment.world.size, timedelta(seconds=timeout_seconds + BEYOND_SECONDS)
    with _on_loopback() if size == environment.world.local_size else nullcontext():
        store = next(rendezvous(environment.init_method, rank, size, timeout=timeout))[0]
        distributed.init_process_group(
            environment.world.backend,
            # torchrun's store outlives a process group, and the next one would meet at the addresses of the last
            store=PrefixStore(f"meeting {next(MEETINGS)}", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if environment.world.backend == "nccl" else None,
        )
    yield device
    distributed.destroy_process_group()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """One host: stays off the network, whose name service or firewall can make gloo hang."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ:
        yield
        return
    os.environ[name] = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
    try:
        yield
    finally:
        del os.environ[name]
