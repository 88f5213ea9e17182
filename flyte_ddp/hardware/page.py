"""A machine's facts for people: as text for a terminal or a log, and as a page."""

from collections.abc import Callable
from typing import TypeVar

from flyte_ddp.hardware.capabilities import Capabilities
from flyte_ddp.hardware.machine import Machine, warnings
from flyte_ddp.hardware.nvidia import UnknownError, first_line
from flyte_ddp.launch.environment import threads_per_rank
from flyte_ddp.report.article import Section, article
from flyte_ddp.report.words import multiples
from flyte_ddp.text import gib

T = TypeVar("T")

Lines = list[tuple[str, str]]

TOPOLOGY = "nvidia-smi topo -m"


def facts(machine: Machine) -> dict[str, Lines]:
    """Label and value of every fact, by heading."""
    return {
        "A training here": _training_lines(machine.torch),
        "GPUs": [*_driver_lines(machine), *_torch_lines(machine.torch)],
        "Between GPUs": [
            ("Direct memory access", shown(machine.torch, lambda torch: torch.peers)),
            ("InfiniBand, RoCE", shown(machine.ports, lambda ports: multiples(ports) or "none")),
            ("NCCL settings", ", ".join(f"{name}={value}" for name, value in machine.nccl.items()) or "none"),
        ],
        "Processor and memory": _host_lines(machine),
    }


def shown(fact: T | UnknownError, form: Callable[[T], str]) -> str:
    """The fact in words, or why it is not known."""
    return str(fact) if isinstance(fact, UnknownError) else form(fact)


def as_text(host: str, machine: Machine) -> str:
    """Aligned, for a terminal."""
    sections = facts(machine)
    width = max(len(label) for lines in sections.values() for label, _ in lines) + 2
    parts = [f"Hardware of {host}"]
    for title, lines in sections.items():
        parts.append("\n".join([title, *(f"  {label:<{width}}{value}" for label, value in lines)]))
    parts.append(f"{TOPOLOGY}\n{machine.topology}")
    parts.append("\n".join(["Warnings", *(f"  - {warning}" for warning in warnings(machine) or ["none"])]))
    return "\n\n".join(parts)


def as_page(host: str, machine: Machine) -> str:
    """The content of <body>, see article.article."""
    sections = [Section("", paragraphs=[f"Warning: {text}" for text in warnings(machine)] or ["No warnings."])]
    sections += [Section(title, lines=lines) for title, lines in facts(machine).items()]
    sections.append(Section(TOPOLOGY, output=str(machine.topology)))
    return article("Hardware", host, sections)


def _training_lines(torch: Capabilities | UnknownError) -> Lines:
    if isinstance(torch, UnknownError):
        return [("Ranks", str(torch))]
    if torch.world is None:
        return [("Ranks", f"refused: {torch.refusal}")]
    world = torch.world
    kept = "moved to each rank's GPU once" if world.device == "cuda" else "memory-mapped, one copy for all ranks"
    return [
        ("Ranks", f"{world.size} with {world.backend}, on {world.device}"),
        ("Threads", f"{threads_per_rank(world.size)} for each rank"),
        ("Precision", torch.precision),
        ("Data", f"uint8, {kept}"),
    ]


def _driver_lines(machine: Machine) -> Lines:
    gpus = machine.gpus
    if isinstance(gpus, UnknownError):
        lines = [("Driver", str(gpus))]
    elif not gpus:
        lines = [("Driver", "shows no GPU")]
    else:
        lines = [
            ("Driver", f"{gpus[0].driver}, runs CUDA up to {machine.cuda}"),
            ("It shows", multiples([f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in gpus])),
            ("Memory in use", ", ".join(gpu.used_mib for gpu in gpus) + " MiB"),
            ("MIG", multiples([gpu.mig for gpu in gpus])),
        ]
    return [*lines, ("CUDA_VISIBLE_DEVICES", "not set" if machine.visible is None else f'"{machine.visible}"')]


def _torch_lines(torch: Capabilities | UnknownError) -> Lines:
    if isinstance(torch, UnknownError):
        return [("torch", str(torch))]
    return [
        ("torch can use", multiples(torch.gpus) or f"none: {first_line(torch.no_gpu)}"),
        ("torch", f"{torch.torch}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs only'}"),
        ("NCCL", torch.nccl or "not in this torch"),
    ]


def _host_lines(machine: Machine) -> Lines:
    limit = f"limited to {machine.cpu_limit:g}" if machine.cpu_limit < machine.cores[1] else "no CPU limit"
    return [
        ("Processor", machine.processor),
        ("Cores", f"{machine.cores[0]} usable of {machine.cores[1]}, {limit}"),
        ("bfloat16 instructions", shown(machine.torch, lambda torch: ", ".join(torch.cpu_bfloat16) or "none")),
        ("Memory", shown(machine.memory, lambda sizes: f"{gib(sizes[0])} usable of {gib(sizes[1])}")),
        ("/dev/shm", shown(machine.shared_memory, lambda sizes: f"{gib(sizes[0])} free of {gib(sizes[1])}")),
    ]
