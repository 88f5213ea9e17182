"""On what a training runs: what its bits may depend on, besides its identity, and what is odd about some hosts."""

import itertools
import platform
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from flyte_ddp.launch.environment import Environment, available_cores
from flyte_ddp.settings import RunOptions

MOST_NAMED = 4
MATRIX, PRODUCTS = 4096, 10  # large enough for all of a GPU's cores; 3 ms altogether on an H100
SLOW = 0.8  # of the median
DRIVER = Path("/proc/driver/nvidia/version")


def hardware(device: torch.device) -> str:
    """The GPU's name, or the CPU's instruction set as torch uses it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


class Place(NamedTuple):
    """Where a rank runs.

    Attributes:
        device: by which a GPU is found among its host's.
        hardware: see there.
        facts: by name, what should be alike on all hosts.
        teraflops: of the GPU, in a product of bfloat16 matrices; 0 without one.
    """

    host: str
    device: str
    hardware: str = ""
    facts: Mapping[str, str] = {}
    teraflops: float = 0.0


def places_of_ranks(environment: Environment, device: torch.device) -> list[Place]:
    """Each rank's, by rank; a collective. On a GPU, it takes a tenth of a second."""
    kind, number = hardware(device), serial(device)
    named = f"{kind}, {number}" if number else kind
    own = Place(environment.host, named, kind, facts_of(device), teraflops(device))
    places = [own] * environment.world.size
    distributed.all_gather_object(places, own)
    return places


def serial(device: torch.device) -> str:
    """The UUID of a GPU; empty where torch does not know it."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) if device.type == "cuda" else ""


def facts_of(device: torch.device) -> dict[str, str]:
    """What should be alike on all hosts of a training."""
    facts = {"Python": platform.python_version(), "torch": str(torch.__version__), "cores": str(available_cores())}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"GPU": properties.name, "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB"}
        with suppress(OSError, IndexError):  # not all containers show it
            facts["NVIDIA driver"] = re.findall(r"\d+\.\d+(?:\.\d+)?", DRIVER.read_text())[0]
    return facts


def teraflops(device: torch.device) -> float:
    """Of a product of bfloat16 matrices on a GPU; the best of some, since the first find it cold. 0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    factor = torch.ones(MATRIX, MATRIX, dtype=torch.bfloat16, device=device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(PRODUCTS + 1)]
    for mark in marks:
        mark.record()
        factor @ factor
    torch.cuda.synchronize(device)
    milliseconds = min(before.elapsed_time(after) for before, after in itertools.pairwise(marks))
    return float(2 * MATRIX**3 / milliseconds / 1e9)


def unlike(places: Sequence[Place]) -> list[str]:
    """What is odd about some of the ranks' hosts, or slow about some of their GPUs, as warnings."""
    reasons = []
    of_host = {place.host: place.facts for place in reversed(places)}
    hosts = list(dict.fromkeys(place.host for place in places))
    for name in dict.fromkeys(name for facts in of_host.values() for name in facts):
        values = {host: of_host[host].get(name, "none") for host in hosts}
        most, _ = Counter(values.values()).most_common(1)[0]
        odd = [f"{host} has {value}" for host, value in values.items() if value != most]
        if odd:
            reasons.append(f"{name} differ between hosts: {some(odd)}, others {most}")
    usual = statistics.median(place.teraflops for place in places)
    slow = [
        f"rank {rank} on {place.host} ({place.device}) has {place.teraflops:.0f}"
        for rank, place in enumerate(places)
        if place.teraflops < SLOW * usual
    ]
    if slow:
        reasons.append(f"TFLOPS of GPUs differ, and the slowest sets the pace: {some(slow)}, the median {usual:.0f}")
    return [f"{reason}: an odd host may fail, or be slow; give the training hosts alike" for reason in reasons]


def some(named: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return ", ".join(named[:MOST_NAMED]) + more


def machine(places: Sequence[Place], precision: str, options: RunOptions) -> dict[str, Any]:
    """What all ranks run on, in plain values."""
    return {
        "hardware": " and ".join(dict.fromkeys(place.hardware for place in places)),
        "torch": str(torch.__version__),
        "precision": precision,
        "ranks": len(places),
        "threads": torch.get_num_threads(),
        "sharding": options.sharding,
        "compile": options.compile,
    }


def moved(ran_on: Sequence[dict[str, Any]], now: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """What a training has run on, with what it runs on now as the last; and a remark, if that is other hardware."""
    if not ran_on or ran_on[-1] == now:
        return [*ran_on[:-1], now], []
    before, here = ran_on[-1]["hardware"], now["hardware"]
    remark = f"The checkpoint is from other hardware ({before}) than this ({here}): from here on, bits may differ"
    return [*ran_on, now], [remark] if before != here else []
