"""Inspects a machine: GPUs, interconnect, processor, memory, and how a training would use them.

pyflyte run workflows/hardware.py hardware_wf --options '{"nproc": 4}'
"""

from dataclasses import dataclass
from platform import node
from typing import NamedTuple

from flytekit import task, workflow
from flytekit.types.file import FlyteFile

from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.outputs import output_page
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.resources import training_resources
from flyte_ddp.hardware.machine import Machine, look, warnings
from flyte_ddp.hardware.nvidia import UnknownError
from flyte_ddp.hardware.page import as_page, as_text, facts
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import say_last
from flyte_ddp.settings import RunOptions

set_up_pyflyte()


@dataclass(frozen=True)
class HardwareFacts:
    """The findings, for programs.

    Attributes:
        gpus: number of GPUs that torch can use.
        cores: number of cores that this process may use.
        memory: bytes that this process and its children may use; 0 if unknown.
        world_size: number of ranks that a training would have; 0 if it would be refused, or torch does not answer.
        backend, device, precision: of such a training; empty if it would be refused.
        warnings: what is likely to stop or slow down a training.
        lines: everything in the text, label to value.
    """

    gpus: int
    cores: int
    memory: int
    world_size: int
    backend: str
    device: str
    precision: str
    warnings: list[str]
    lines: dict[str, str]


class HardwareOutputs(NamedTuple):
    """The findings for programs, as text for the terminal, and as a page in one file."""

    facts: HardwareFacts
    text: str
    report: FlyteFile["html"]  # noqa: F821


@task(enable_deck=True, deck_fields=(), **training_resources())  # where training runs, and never cached
def inspect_hardware(hp: Hyperparameters, options: RunOptions) -> HardwareOutputs:
    """Inspects the machine that a training task would get."""
    host, machine = node(), look(hp, options)
    text, fragment = as_text(host, machine), as_page(host, machine)
    with run_folder(platform, "hardware") as folder:
        report = output_page(folder, "Hardware", fragment)
    say_last(text)
    return HardwareOutputs(summarise(machine), text, report)


def summarise(machine: Machine) -> HardwareFacts:
    torch = None if isinstance(machine.torch, UnknownError) else machine.torch
    world = torch.world if torch else None
    return HardwareFacts(
        gpus=len(torch.gpus) if torch else 0,
        cores=machine.cores[0],
        memory=0 if isinstance(machine.memory, UnknownError) else machine.memory[0],
        world_size=world.size if world else 0,
        backend=world.backend if world else "",
        device=world.device if world else "",
        precision=torch.precision if torch else "",
        warnings=warnings(machine),
        lines=dict(line for lines in facts(machine).values() for line in lines),
    )


@workflow
def hardware_wf(hp: Hyperparameters = Hyperparameters(), options: RunOptions = RunOptions()) -> HardwareOutputs:
    """Shows what a training node has, and how a training with these inputs would use it.

    Args:
        hp: of the training; only backend, batch_size and precision matter here.
        options: of the training; only nproc matters here.
    """
    return inspect_hardware(hp=hp, options=options)


if __name__ == "__main__":
    print(hardware_wf())
