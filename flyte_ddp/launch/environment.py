"""The environment of a process, from what its host and its environment variables offer: ranks, GPUs, cores.

These are in one module because the number of ranks follows from GPUs and cores. Standard library only: the parent
decides without torch.
"""

import importlib.util
import math
import os
import platform
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.errors import InputError
from flyte_ddp.launch import nvml
from flyte_ddp.launch.limits import cpu_limit

DEFAULT_CPU_RANKS = 2
NODE_VARIABLE = "DDP_NODE_NAME"  # Kubernetes puts the name of a pod's node there, if the registration asks for it


@dataclass(frozen=True)
class World:
    """All ranks of one run.

    Attributes:
        size: the number of ranks.
        local_size: the number of ranks on this host; each host has as many.
        backend: "nccl" or "gloo".
        device: "cuda" or "cpu".
    """

    size: int
    local_size: int
    backend: str
    device: str


@dataclass(frozen=True)
class Environment:
    """A rank, with all that its process needs to know to join the others.

    Attributes:
        world: all ranks.
        rank: the number of this rank in the world, from 0.
        local_rank: its number on its host, from 0.
        init_method: the address of the rendezvous: env:// (torchrun's variables), or file:// with a path that is not
            escaped.
        threads: the number of torch threads that this rank should have.
    """

    world: World
    rank: int
    local_rank: int
    init_method: str
    threads: int

    @property
    def host(self) -> str:
        return host_name()


def host_name() -> str:
    """Return the name of this host. In a pod it is the name of the node, if the pod knows that, or else of the pod."""
    return os.environ.get(NODE_VARIABLE) or platform.node()


def choose_world(backend: str, nproc: int, batch_size: int, virtual_ranks: int = 0) -> World:
    """Choose the number of ranks to run, all of them on this host, and their backend and device.

    The device is "cuda" if a GPU is visible, also under gloo.

    Args:
        backend: "nccl", "gloo" or "auto". "auto" is nccl if there is a GPU, and otherwise gloo. Under gloo, ranks may
            share a GPU.
        nproc: the number of ranks. 0 means one for each visible GPU, or two without a GPU, but no more than can share a
            batch.
        batch_size: the samples of a batch. Without virtual ranks, at most as many ranks can share the batch.
        virtual_ranks: the number of parts that the training cuts a batch into. At most as many ranks can share the
            batch. 0 without virtual ranks.

    Raises:
        InputError: The backend is nccl, and there is no GPU or fewer GPUs than nproc; or there are more ranks than can
            share a batch.
    """
    gpus = visible_gpus()
    if backend == "nccl" and gpus == 0:
        raise InputError('backend "nccl" needs a GPU and none is visible here: use "gloo" or "auto"')
    if backend == "auto":
        backend = "nccl" if gpus else "gloo"
    if backend == "nccl" and nproc > gpus:
        raise InputError(f"nproc must be at most the number of visible GPUs ({gpus}) under nccl, got {nproc}: lower it")
    size = nproc or min(gpus or DEFAULT_CPU_RANKS, virtual_ranks or batch_size)
    check_ranks(size, batch_size, virtual_ranks)
    return World(size=size, local_size=size, backend=backend, device="cuda" if gpus else "cpu")


def check_ranks(size: int, batch_size: int, virtual_ranks: int = 0) -> None:
    """Raise InputError if there are more ranks than virtual ranks or, without virtual ranks, than samples in a batch.

    Args:
        size: the number of ranks.
        batch_size: the samples of a batch, of all ranks together. Ignored unless virtual_ranks is 0.
        virtual_ranks: the number of virtual ranks; 0 if the training has none.
    """
    name, most = ("virtual_ranks", virtual_ranks) if virtual_ranks else ("batch_size", batch_size)
    if most < size:
        cost = ", which gives other bits," if virtual_ranks else ""
        raise InputError(
            f"{name} must be at least the number of ranks ({size}), got {most}: raise it{cost} or start fewer ranks "
            "(nproc)"
        )


def environment_from_torchrun(backend: str, nodes: tuple[int, int], ranks_per_node: int) -> Environment:
    """Return this rank's environment from torchrun's variables, after checking the numbers of nodes and ranks.

    Args:
        backend: "auto" (nccl if there is a GPU, else gloo), "gloo" or "nccl".
        nodes: the least and the largest number of nodes. Every number between these is accepted.
        ranks_per_node: the number of ranks that each node must have.

    Raises:
        InputError: the number of nodes or of ranks per node is not accepted; a variable is missing or impossible; or
            nccl has too few GPUs for the ranks of this node.
    """
    environment = environment_from_variables(backend)
    size, local_size = environment.world.size, environment.world.local_size
    # A node that trains alone would return its result as that of all nodes
    is_registered = size % ranks_per_node == 0 and nodes[0] <= size // ranks_per_node <= nodes[1]
    if not is_registered or local_size != ranks_per_node:
        raise InputError(
            f"WORLD_SIZE must be that of {nodes[0]} to {nodes[1]} nodes with {ranks_per_node} ranks each, as "
            f"registered, got {size} with {local_size} on this node: "
            "register again with the DDP_NNODES and DDP_NPROC_PER_NODE that the cluster can start"
        )
    return environment


def environment_from_variables(backend: str) -> Environment:
    """Return this rank's environment from the variables that torchrun, or a PyTorchJob, has set.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set. Without LOCAL_WORLD_SIZE, each node has one rank.

    Args:
        backend: "auto" (nccl if there is a GPU, else gloo), "gloo" or "nccl".

    Raises:
        InputError: a variable is missing or impossible, or nccl has too few GPUs for the ranks of this node.
    """
    needed = [name for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if needed:
        why = "many nodes train under torchrun or in a PyTorchJob"
        if "WORLD_SIZE" in os.environ:
            why = (
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that torchrun, or a PyTorchJob, has started this process: "
                "if it is left over from something else, unset it, in a notebook by os.environ.pop('WORLD_SIZE')"
            )
        raise InputError(f"{needed[0]} is not set: {why}")
    size, local_size = _whole_number("WORLD_SIZE", 1, 1), _whole_number("LOCAL_WORLD_SIZE", 1, 1)
    rank, local_rank = _whole_number("RANK", 0, 0, size - 1), _whole_number("LOCAL_RANK", 0, 0)
    _whole_number("MASTER_PORT", 0, 0, 2**16 - 1)  # torch reads the port
    gpus = visible_gpus()
    if backend == "auto":
        backend = "nccl" if gpus else "gloo"
    # A rank that sees a single GPU may have a GPU of its own: Slurm's --gpus-per-task gives each rank another mask.
    # nccl itself reports two ranks with the same GPU.
    is_masked = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if backend == "nccl" and local_size > gpus and not is_masked:
        raise InputError(
            f"nccl needs a GPU for each of the {local_size} ranks of a node, got {gpus}: lower their number"
        )
    world = World(size=size, local_size=local_size, backend=backend, device="cuda" if gpus else "cpu")
    return Environment(world, rank, local_rank, "env://", threads=threads_per_rank(local_size))


def _whole_number(name: str, default: int, minimum: int, maximum: float = math.inf) -> int:
    """Return an environment variable as a whole number, or the default if it is not set.

    Raises:
        InputError: The variable is not a whole number, or is below `minimum` or above `maximum`.
    """
    # Ranks with other numbers would fail deep in torch, or wait for a rank that never comes
    text = os.environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{name} must be a whole number, as torchrun sets it, got {text!r}") from None
    if not minimum <= value <= maximum:
        limits = f"at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum}"
        raise InputError(f"{name} must be {limits}, as torchrun sets it, got {text!r}")
    return value


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of those that a launcher has started; True if there is no launcher."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK") == "0"


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs that ranks on this host can use: 0 if the installed torch is not built for CUDA.

    GPUs that CUDA_VISIBLE_DEVICES leaves out do not count. NVML counts the GPUs, without CUDA and torch. Torch, which
    takes seconds to import, is asked only if there are NVIDIA device files, but NVML cannot be used.

    Args:
        devices: the folder of device files.
    """
    # The driver has a file for each GPU, or a single one, dxg, under Windows (WSL)
    has_driver = any(devices.glob("nvidia[0-9]*")) or any(devices.glob("dxg"))
    if not (has_driver and _torch_has_cuda()):
        return 0
    try:
        return nvml.count_cuda_devices(nvml.list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NvmlError:
        import torch

        return torch.cuda.device_count()


def _torch_has_cuda() -> bool:
    """Return whether the installed torch is built for CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or []
    return any(runpy.run_path(str(Path(folder, "version.py")))["cuda"] for folder in folders)


def available_cores() -> int:
    """Return the number of cores that this process may use, by its affinity mask and the container's CPU limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, int(min(cores, cpu_limit())))


def threads_per_rank(local_size: int) -> int:
    """Return the number of torch threads for each of this many ranks on this host: an equal share of its cores."""
    return max(1, available_cores() // local_size)


@contextmanager
def default_variable(name: str, value: str, *others: str) -> Iterator[None]:
    """Set an environment variable while the block runs, unless that variable or one of `others` is set already.

    The variable is removed when the block ends.

    Args:
        name: the variable.
        value: its value.
        others: variables with the same purpose, which the user may have set instead.
    """
    if {name, *others} & {*os.environ}:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
