"""The ranks' meeting: one process group, with a time-out, cleaned up on every path that ends well."""

import os
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Iterator

import torch
from torch import distributed

from flyte_ddp.launch.environment import Environment

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
    with _on_loopback() if environment.world.size == environment.world.local_size else nullcontext():
        distributed.init_process_group(
            environment.world.backend,
            init_method=environment.init_method,
            rank=environment.rank,
            world_size=environment.world.size,
            timeout=timedelta(seconds=timeout_seconds + BEYOND_SECONDS),
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
