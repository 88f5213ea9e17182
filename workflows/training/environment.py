"""Who a rank is, and how many ranks a host should have. Standard library only: the parent decides without torch."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from workflows.training.errors import InputError

DEFAULT_CPU_RANKS = 2


@dataclass(frozen=True)
class World:
    """All ranks of one training run.

    Attributes:
        size: number of ranks.
        local_size: number of ranks on this host.
        backend: nccl or gloo.
        device: cuda or cpu.
    """

    size: int
    local_size: int
    backend: str
    device: str


@dataclass(frozen=True)
class Environment:
    """One rank's place in the world, whoever started its process.

    Attributes:
        rank: from 0 to world.size - 1.
        local_rank: from 0 to world.local_size - 1 on this host.
        init_method: where the ranks meet, as torch.distributed.init_process_group takes it.
        threads: for the arithmetic of this rank.
    """

    world: World
    rank: int
    local_rank: int
    init_method: str
    threads: int

    @property
    def host(self) -> str:
        return platform.node()


def choose_world(backend: str, nproc: int, batch_size: int) -> World:
    """The ranks that this host should run for a backend (auto, gloo, nccl) and a wish (nproc, 0 for none).

    One rank per visible GPU with nccl, else two with gloo. Ranks under gloo may share a GPU.
    Raises InputError where the wish cannot be had.
    """
    gpus = visible_gpus()
    if backend == "nccl" and gpus == 0:
        raise InputError('backend "nccl" needs a GPU and none is visible here: use "gloo" or "auto"')
    backend = backend if backend != "auto" else ("nccl" if gpus else "gloo")
    if backend == "nccl" and nproc > gpus:
        raise InputError(f"nproc must be at most the number of visible GPUs ({gpus}) under nccl, got {nproc}: lower it")
    size = nproc or min(gpus or DEFAULT_CPU_RANKS, batch_size)
    if batch_size < size:
        raise InputError(
            f"batch_size must be at least the number of ranks ({size}), got {batch_size}: raise it or lower nproc"
        )
    return World(size=size, local_size=size, backend=backend, device="cuda" if gpus else "cpu")


def visible_gpus() -> int:
    """Number of GPUs that torch can use; torch, seconds to import, is asked only where there is an NVIDIA device."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def available_cores() -> int:
    """Cores that this process may use: the affinity mask, less where a container's CPU limit is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no control group here, or its quota is "max"
        return cores
