"""The places of ranks: hosts and devices, their equipment and their speed; and the machine that all are together."""

import itertools
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.hosts.links import GPU_LINK, measure_link_speeds
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.sharding.sharding import is_sharded
from flyte_ddp.launch.environment import Environment, available_cores
from flyte_ddp.launch.limits import usable_memory
from flyte_ddp.launch.nvml import why_slow
from flyte_ddp.settings import RunOptions
from flyte_ddp.text import GIB, gib

MATRIX = 4096  # rows and columns, which keep all of a GPU's cores busy
PRODUCTS = 10  # 3 ms in total on an H100
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")


class Place(NamedTuple):
    """The place where a rank runs.

    Attributes:
        host: the name of the host.
        device: the hardware, with the UUID by which a GPU is found among its host's.
        hardware: the name of the GPU, or the CPU's instruction set as torch uses it.
        facts: texts by name, such as versions, that should be the same on all hosts.
        figures: numbers by name, such as GiB of memory, that should be about as high on all hosts or GPUs.
        product: the digest of a product of matrices, equal on all correct GPUs of a kind; 0 on a CPU.
        link: GB/s to the rank at the same place of the next host; 0 if there is one host.
        clock: time.time() of the host, read when all hosts' clocks should show the same.
        slow_by: why the GPU keeps its clocks low, such as heat; empty if it does not.
        lacks: a sentence on too small a disk; empty if there is room.
    """

    host: str
    device: str
    hardware: str = ""
    facts: Mapping[str, str] = {}
    figures: Mapping[str, float] = {}
    product: int = 0
    link: float = 0.0
    clock: float = 0.0
    slow_by: str = ""
    lacks: str = ""


def measure_places(environment: Environment, device: torch.device, job: Job, model: nn.Module) -> list[Place]:
    """Measure the host and device of each rank, and return the places of all ranks; a collective.

    To measure their links, neighbours send each other messages. On a GPU, matrices are multiplied as a test, which
    takes some tenths of a second. Nothing is refused: Place.lacks says if the disk is too small.

    Args:
        environment: this rank and its host.
        device: this rank's device.
        job: the job, for the disk of its checkpoints and its version of the code.
        model: the network, for the size of its weights.

    Returns:
        The places by rank, the same list on all ranks.
    """
    hosts = gather_values(environment.host)
    clock = time.time()  # all ranks are here now
    within, between = measure_link_speeds(hosts, environment.rank, device)
    teraflops, product = multiply_matrices(device)
    figures = {**measure_memory(device), "TFLOPS": teraflops, GPU_LINK: within}
    kind = hardware(device)
    uuid = get_uuid(device)
    own = Place(
        host=environment.host,
        device=f"{kind}, {uuid}" if uuid else kind,
        hardware=kind,
        facts={**collect_facts(device), "code": job.code_version},
        figures={name: figure for name, figure in figures.items() if figure},
        product=product,
        link=between,
        clock=clock,
        slow_by=why_slow(f"GPU-{uuid}") if uuid else "",
        lacks=check_disk(job, weights_bytes(model)),
    )
    return gather_values(own)


def hardware(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's instruction set as torch uses it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def get_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU; empty on a CPU, and if torch does not know the UUID."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) if device.type == "cuda" else ""


def collect_facts(device: torch.device) -> dict[str, str]:
    """Return the versions and equipment of this host and device that should be the same on all hosts of a training.

    Returns:
        Texts by name: the versions of Python and torch, the number of cores and, on a GPU, its name, its memory and
            the driver's version. The driver is left out where a container hides it.
    """
    facts = {"Python": platform.python_version(), "torch": str(torch.__version__), "cores": str(available_cores())}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"GPU": properties.name, "GPU memory": f"{properties.total_memory / GIB:.0f} GiB"}
        with suppress(OSError, IndexError):  # not all containers show the driver's version
            facts["NVIDIA driver"] = re.findall(r"\d+\.\d+(?:\.\d+)?", DRIVER.read_text())[0]
    return facts


def measure_memory(device: torch.device) -> dict[str, float]:
    """Return the memory of this host and its GPU in GiB, by name, to compare hosts by.

    A name is left out if there is no such memory.

    Returns:
        "GiB of memory" is all that this process may use, whether free or not: the host's memory or the lowest limit.
        "GiB of /dev/shm" is its size. "free GiB of GPU memory" is what is free now, plus what torch has reserved in
        this process.
    """
    found = {"GiB of memory": usable_memory() / GIB}
    with suppress(OSError):
        found["GiB of /dev/shm"] = shutil.disk_usage(SHARED_MEMORY).total / GIB
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        found["free GiB of GPU memory"] = (free + torch.cuda.memory_reserved(device)) / GIB
    return found


def multiply_matrices(device: torch.device) -> tuple[float, int]:
    """Multiply two bfloat16 matrices on a GPU several times, the same on each GPU, as a test of its speed and bits.

    Returns:
        The TFLOPS of the fastest product, since a cold GPU is slow at first; and the digest of the product, which all
            correct GPUs of a kind have alike. Both are 0 on a CPU.
    """
    if device.type != "cuda":
        return 0.0, 0
    factor = torch.arange(MATRIX**2, device=device).remainder_(251).sub_(125).to(torch.bfloat16).view(MATRIX, MATRIX)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(PRODUCTS + 1)]
    for mark in marks:
        mark.record()
        product = factor @ factor
    torch.cuda.synchronize(device)
    milliseconds = min(before.elapsed_time(after) for before, after in itertools.pairwise(marks))
    return float(2 * MATRIX**3 / milliseconds / 1e9), int(compute_sum(product).item())


def weights_bytes(model: nn.Module) -> int:
    """Return how many bytes of a network's weights a rank has: of a sharded network, its part; otherwise all."""
    count = sum(weight.nbytes for weight in model.parameters())
    return count // distributed.get_world_size() if is_sharded(model) else count


def check_disk(job: Job, weights: int) -> str:
    """Return a sentence that says that the disk for checkpoints has too little room, or "" if it has enough.

    It must have free space for the weights twice: in the checkpoint and in the model. An optimizer's state is not
    counted. The result is "" as well if this rank writes no checkpoint.

    Args:
        job: the job, with the path of its checkpoint.
        weights: the size of the weights, in bytes.
    """
    if not job.checkpoint_path:
        return ""
    folder = Path(job.checkpoint_path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free >= 2 * weights:
        return ""
    return (
        f"{folder} has {gib(free)} free, and the weights take {gib(weights)}, in a checkpoint and in the model each: "
        f"free some, or choose another folder ({job.chosen_by})"
    )


def describe_machine(places: Sequence[Place], precision: str, options: RunOptions) -> dict[str, Any]:
    """Return what all ranks together run on, and what else a result's bits may depend on, as plain values by name.

    Returns:
        "hardware" (each kind of processor once), "torch" (this process's version), "precision", "ranks" (their number),
        "threads" (torch's in this process), "sharding" and "compile" (the options).
    """
    return {
        "hardware": " and ".join(dict.fromkeys(place.hardware for place in places)),
        "torch": str(torch.__version__),
        "precision": precision,
        "ranks": len(places),
        "threads": torch.get_num_threads(),
        "sharding": options.sharding,
        "compile": options.compile,
    }


def add_machine(
    ran_on: Sequence[dict[str, Any]], now: dict[str, Any], virtual_ranks: int | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Add the present machine to those that a training has run on, and return remarks on what has changed.

    Args:
        ran_on: the machines until now, as describe_machine() returned them, the latest last; empty at the start of a
            training. It is not changed.
        now: the present machine.
        virtual_ranks: the setting, with which the number of ranks does not change the result. None if it cannot be set,
            as under Lightning.

    Returns:
        Two lists. The first is ran_on and the present machine, unless it is equal to the latest one. The second has
        remarks for the user: one if the hardware is other than before, and one if the number of ranks is and
        virtual_ranks are not set.
    """
    if not ran_on or ran_on[-1] == now:
        return [*ran_on[:-1], now], []
    before = ran_on[-1]
    remarks = []
    if before["hardware"] != now["hardware"]:
        remarks.append(
            f"The checkpoint is from other hardware ({before['hardware']}) than this ({now['hardware']}): from here "
            "on, bits may differ"
        )
    if before["ranks"] != now["ranks"] and not virtual_ranks:
        remedy = "" if virtual_ranks is None else ", which only virtual_ranks would keep"
        remarks.append(
            f"The checkpoint is from another number of ranks ({before['ranks']}) than this ({now['ranks']}): the "
            f"result is not that of the former number{remedy}"
        )
    return [*ran_on, now], remarks
