"""Runs the training engine without Flyte, and describes the hardware."""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows import training
from benchmarks.gpu_rows.training import IMAGES, WORKER
from flyte_ddp.events import Event
from flyte_ddp.launch.environment import available_cores, choose_world, visible_gpus
from flyte_ddp.report.surroundings import processor
from flyte_ddp.settings import TrainingSettings


def train(
    hp: TrainingSettings,
    data: Path | None,
    nproc: int = 0,
    folder: str = "",
    checkpoint_seconds: float = 1e9,
    on_event: Callable[[Event], None] = lambda event: None,
    worker: str = WORKER,
    loader_workers: int = 0,
    recipe: str = IMAGES,
) -> list[Any]:
    """One training by real ranks; returns what the worker returns on each, by default a TrainingResult.

    Model and checkpoint are written to folder, and a later training resumes from there; without it they are discarded.
    """
    return training.train(
        recipe,
        hp,
        choose_world(hp.backend, nproc, hp.batch_size),
        str(data) if data else "",
        folder,
        worker,
        on_event,
        checkpoint_seconds=checkpoint_seconds,
        loader_workers=loader_workers,
    )


def hardware() -> str:
    """One line: processor, cores, GPUs, and the versions that affect the speed."""
    model, cpuinfo = processor(), Path("/proc/cpuinfo")
    if cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text():
        model += " with avx512_bf16"
    gpus = visible_gpus()
    return (
        f"{model}, {available_cores()} of {os.cpu_count()} cores, {gpus or 'no'} GPU{'s' if gpus > 1 else ''}; "
        f"Python {platform.python_version()}, torch {version('torch')}, flytekit {version('flytekit')}"
    )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def percent(values: Sequence[float]) -> str:
    """Mean, standard deviation (0 for a single one) and range of accuracies in per cent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {deviation:.2f} % [{min(values):.2f}-{max(values):.2f}]"
