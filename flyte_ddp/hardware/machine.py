"""The machine that a training finds: facts, any of which may be unknown, and warnings that follow from them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flyte_ddp.hardware import nvidia
from flyte_ddp.hardware.capabilities import Capabilities
from flyte_ddp.hardware.nvidia import DriverGpu, UnknownError, first_line
from flyte_ddp.launch.alone import run_alone
from flyte_ddp.launch.environment import available_cores, nvidia_devices, threads_per_rank
from flyte_ddp.launch.failures import RankError
from flyte_ddp.launch.limits import cpu_limit, usable_memory
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.surroundings import processor
from flyte_ddp.settings import RunOptions
from flyte_ddp.text import GIB, gib

T = TypeVar("T")

SURVEY = "flyte_ddp.hardware.rank:survey"  # a name, because importing it would import torch
SURVEY_SECONDS = 120.0  # until torch counts as hung; CUDA takes seconds for each GPU
SHARED_MEMORY = GIB  # what NVIDIA's documentation recommends for containers with NCCL
# Bytes of host memory for each rank. cpu: measured on MNIST, where two ranks and their parent take 0.8 GB;
# cuda: an estimate, for the CUDA context and its libraries
RANK_MEMORY = {"cpu": GIB // 2, "cuda": 4 * GIB}


@dataclass(frozen=True)
class Machine:
    """The facts; UnknownError, with the reason, replaces what could not be found out.

    Attributes:
        gpus: all that the driver knows; torch has those that it can use.
        cuda: the newest version that the driver can run.
        topology: what `nvidia-smi topo -m` prints.
        devices: number of the driver's device files.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
        ports: InfiniBand and RoCE, rate and state of each.
        nccl: NCCL's settings in the environment.
        cores: usable ones and the machine's.
        cpu_limit: in cores, of control groups; infinity for none.
        memory: usable bytes and the machine's.
        shared_memory: bytes free in /dev/shm and its size.
    """

    gpus: list[DriverGpu] | UnknownError
    cuda: str | UnknownError
    topology: str | UnknownError
    torch: Capabilities | UnknownError
    devices: int
    visible: str | None
    ports: list[str] | UnknownError
    nccl: dict[str, str]
    processor: str
    cores: tuple[int, int]
    cpu_limit: float
    memory: tuple[int, int] | UnknownError
    shared_memory: tuple[int, int] | UnknownError


def look(hp: Hyperparameters, options: RunOptions) -> Machine:
    """The machine that this process runs on, and how a training with these inputs would use it."""
    return Machine(
        gpus=known(lambda: nvidia.answer(nvidia.gpus)),
        cuda=known(lambda: nvidia.answer(nvidia.cuda)),
        topology=known(lambda: nvidia.answer(nvidia.topology)),
        torch=known(lambda: ask_torch(hp, options)),
        devices=nvidia_devices(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        ports=known(ports),
        nccl={name: value for name, value in sorted(os.environ.items()) if "NCCL_" in name},
        processor=processor(),
        cores=(available_cores(), os.cpu_count() or available_cores()),
        cpu_limit=cpu_limit(),
        memory=known(lambda: (usable_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))),
        shared_memory=known(shared_memory),
    )


def known(ask: Callable[[], T]) -> T | UnknownError:
    """The answer, or why there is none."""
    try:
        return ask()
    except UnknownError as reason:
        return reason
    except (OSError, ValueError) as error:
        return UnknownError(str(error))


def ask_torch(hp: Hyperparameters, options: RunOptions) -> Capabilities:
    try:
        capabilities: Capabilities = run_alone(SURVEY, (hp, options), SURVEY_SECONDS, lambda event: None)
    except RankError as failed:
        raise UnknownError(f"torch ended with {failed.failure.cause}: {failed.failure.message}") from None
    return capabilities


def ports() -> list[str]:
    folders = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return [f"{(port / 'rate').read_text().strip()}, {(port / 'state').read_text().strip()}" for port in folders]


def shared_memory() -> tuple[int, int]:
    stats = os.statvfs("/dev/shm")
    return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize


def warnings(machine: Machine) -> list[str]:
    """What is likely to stop a training here or slow it down, and what to do about it."""
    torch = machine.torch
    if isinstance(torch, UnknownError):
        return [f"what torch can do here is {torch}"]
    return [*_about_gpus(machine, torch), *_about_host(machine, torch)]


def _about_gpus(machine: Machine, torch: Capabilities) -> Iterator[str]:
    gpus = [] if isinstance(machine.gpus, UnknownError) else machine.gpus
    shown, used = len(gpus) or machine.devices, len(torch.gpus)
    if used < shown and machine.visible is not None:
        yield f'torch uses {used} of {shown} GPUs, and CUDA_VISIBLE_DEVICES is "{machine.visible}": unset it to use all'
    elif 0 < used < shown:
        yield f"torch uses {used} of the {shown} GPUs that the driver shows"
    if not used and shown:
        yield f"torch {torch.torch} cannot use the GPU that is here: {first_line(torch.no_gpu)}"
    for complaint in torch.complaints:
        yield f"torch: {first_line(complaint)}"
    divided = [gpu.index for gpu in gpus if gpu.mig == "Enabled"]
    if divided:
        yield (
            f"MIG partitions GPU {', '.join(divided)}: a process sees only one instance, and NCCL cannot connect two "
            "instances of one GPU, so train with one rank, or without MIG"
        )
    if len({*torch.gpus}) > 1:
        yield "the GPUs differ, and the slowest sets the pace: choose equal ones with CUDA_VISIBLE_DEVICES"


def _about_host(machine: Machine, torch: Capabilities) -> Iterator[str]:
    if torch.world is None:
        yield f"a training with these inputs is refused: {torch.refusal}"
        return
    world = torch.world
    cores, all_cores = machine.cores
    if machine.cpu_limit < all_cores:
        yield (
            f"the container may use {machine.cpu_limit:g} of the machine's {all_cores} cores: "
            f"training runs {threads_per_rank(world.size)} threads in each rank; raise the CPU limit if that is not "
            "meant"
        )
    if world.size > cores:
        yield f"{world.size} ranks share {cores} core{'s' * (cores > 1)}: lower nproc or raise the CPU limit"
    need = RANK_MEMORY[world.device] * world.size
    if not isinstance(machine.memory, UnknownError) and machine.memory[0] < need:
        yield f"{gib(machine.memory[0])} of memory is less than {world.size} ranks need ({gib(need)}): raise the limit"
    if world.backend == "nccl" and world.size > 1 and not isinstance(machine.shared_memory, UnknownError):
        free, _ = machine.shared_memory
        if free < SHARED_MEMORY:
            yield (
                f"/dev/shm has {gib(free)} free, and NCCL uses it between ranks: give the container at least 1 GiB "
                "(docker run --shm-size=1g; shared_memory=True of a Flyte task)"
            )
    if torch.precision == "float32":
        yield "no bfloat16 in hardware here, or not requested: training computes in float32, which takes longer"
