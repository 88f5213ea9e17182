"""On what a training runs: all, besides its identity, that the bits of its result may depend on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from flyte_ddp.launch.environment import Environment
from flyte_ddp.settings import RunOptions


def hardware(device: torch.device) -> str:
    """The GPU's name, or the CPU's instruction set as torch uses it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def device_with_serial(device: torch.device) -> str:
    """By which a GPU is found among its host's."""
    number = getattr(torch.cuda.get_device_properties(device), "uuid", "") if device.type == "cuda" else ""
    return f"{hardware(device)}, {number}" if number else hardware(device)


def machine(environment: Environment, device: torch.device, precision: str, options: RunOptions) -> dict[str, Any]:
    """What all ranks run on, in plain values; a collective."""
    names = [""] * environment.world.size
    distributed.all_gather_object(names, hardware(device))
    return {
        "hardware": " and ".join(dict.fromkeys(names)),
        "torch": str(torch.__version__),
        "precision": precision,
        "ranks": environment.world.size,
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
