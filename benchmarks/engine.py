"""Runs the training engine without Flyte, and describes the hardware."""

import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, List, Sequence

from flyte_ddp.data.prepared import read_description
from flyte_ddp.engine.job import Identity, Job
from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import available_cores, choose_world, visible_gpus
from flyte_ddp.settings import TrainingSettings

WORKER = "flyte_ddp.engine.worker:run"
RECIPE = "flyte_ddp.recipes.images:ImageClassifier"


def train(
    hp: TrainingSettings,
    data: Path,
    nproc: int = 0,
    folder: str = "",
    checkpoint_seconds: float = 1e9,
    on_event: Callable[[Event], None] = lambda event: None,
    worker: str = WORKER,
    loader_workers: int = 0,
    recipe: str = RECIPE,
) -> List[Any]:
    """One training by real ranks; returns what the worker returns on each, by default a TrainingResult.

    Model and checkpoint are written to folder, and a later training resumes from there; without it they are discarded.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place, description = Path(folder or temporary), read_description(data)
        job = Job(
            identity=Identity(recipe, hp, description.digest, "benchmark"),
            dataset=description.name,
            data=str(data),
            model_path=str(place / "model.pt"),
            predictions_path=str(place / "predictions.npy"),
            pictures_path=str(place / "pictures.npz"),
            checkpoint_path=str(place / "checkpoint"),
            checkpoint_seconds=checkpoint_seconds,
            timeout_seconds=120,
            launched=time.time(),
            loader_workers=loader_workers,
            pin_memory=True,
        )
        world = choose_world(hp.backend, nproc, hp.batch_size)
        return launcher.launch(worker, world, job, 120, on_event)


def hardware() -> str:
    """One line: processor, cores, GPUs, and the versions that affect the speed."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags")).split()
        model += " with avx512_bf16" if "avx512_bf16" in flags else ""
    except (OSError, StopIteration):
        pass
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
