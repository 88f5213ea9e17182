"""Trainings for the rows: the engine started by its launcher, without Flyte."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyte_ddp.code.user_code import find_code
from flyte_ddp.data.prepared.prepared import read_description
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.settings import RunOptions, TrainingSettings

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
    sharding: str = "off",
    compile: bool = False,
    audit_every: int = 0,
    source: str = "",
) -> list[Any]:
    """What the target returns on each rank; model and checkpoint are written to folder, if given. data: a prepared
    dataset; source: other data."""
    with tempfile.TemporaryDirectory() as temporary:
        options = RunOptions(
            checkpoint_seconds=checkpoint_seconds,
            timeout_seconds=timeout_seconds,
            loader_workers=loader_workers,
            sharding=sharding,
            compile=compile,
            audit_every=audit_every,
        )
        description = read_description(data) if data else None
        path = Path(data or source) if data or source else None
        subject = make_subject(find_code(recipe), settings, path, description=description)
        job = job_in(Path(folder or temporary), subject, options)
        return launcher.launch(target, world, job, timeout_seconds, on_event)
