"""Trainings for the rows: the engine started by its launcher, without Flyte."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyte_ddp.data.prepared import read_description
from flyte_ddp.engine.job import Identity, Job
from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.settings import TrainingSettings

WORKER = "flyte_ddp.engine.worker:run"
FAULTY, IMAGES = "benchmarks.gpu_rows.faulty:Faulty", "flyte_ddp.recipes.images:ImageClassifier"


def train(
    recipe: str,
    settings: TrainingSettings,
    world: World,
    data: str = "",
    folder: str = "",
    target: str = WORKER,
    on_event: Callable[[Event], None] = lambda event: None,
    timeout_seconds: float = 120,
    checkpoint_seconds: float = 1e9,
    loader_workers: int = 0,
) -> list[Any]:
    """What the target returns on each rank; model and checkpoint are written to folder, if given."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        description = read_description(data) if data else None
        job = Job(
            identity=Identity(recipe, settings, description.digest if description else "", "benchmark"),
            dataset=description.name if description else "made up",
            data=data,
            model_path=str(place / "model.pt"),
            predictions_path=str(place / "predictions.npy"),
            pictures_path=str(place / "pictures.npz"),
            checkpoint_path=str(place / "checkpoint"),
            checkpoint_seconds=checkpoint_seconds,
            timeout_seconds=timeout_seconds,
            launched=time.time(),
            loader_workers=loader_workers,
            pin_memory=True,
        )
        return launcher.launch(target, world, job, timeout_seconds, on_event)
