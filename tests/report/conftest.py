"""One small real training, profiled, on data whose names mean harm, and everything that was said of it."""

import pickle
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flyte_ddp.data import prepared
from flyte_ddp.data.datasets import prepare
from flyte_ddp.data.writer import write_prepared
from flyte_ddp.engine.job import Identity, Job
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.record import Record, RunFinished, RunInfo
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.settings import RunOptions
from tests.once import made_once

HOSTILE = """<script>alert(1)</script>"'&{{ 7 * 7 }}"""
HOSTILE_CLASS = "<img src=x onerror=alert(2)>"


class Recorded(NamedTuple):
    info: RunInfo
    events: list[Any]  # the last is RunFinished

    @property
    def record(self) -> Record:
        record = Record(self.info)
        for event in self.events:
            record(event)
        return record

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(scope="session")
def recorded() -> Recorded:
    """Two epochs of ten steps of 64 digits by two ranks, logged at each fifth, evaluated on 96; for reading only."""
    found: Recorded = pickle.loads((made_once("recorded", record) / "recorded.pickle").read_bytes())
    return found


def record(folder: Path) -> None:
    (folder / "logs").mkdir()
    digits = prepare("digits")
    (images, labels), (test_images, test_labels) = (prepared.open_split(digits, split) for split in prepared.SPLITS)
    classes = [*map(str, range(9)), HOSTILE_CLASS]
    description = write_prepared(
        folder / "data", HOSTILE, classes, images[:640], labels[:640], test_images[:96], test_labels[:96]
    )
    hp = Hyperparameters(
        dataset="digits", epochs=2, batch_size=64, test_batch_size=40, log_interval=5, precision="float32"
    )
    job = Job(
        identity=Identity("flyte_ddp.recipes.images:ImageClassifier", hp, description.digest, "code"),
        dataset=HOSTILE,
        data=str(folder / "data"),
        model_path=str(folder / "model.pt"),
        predictions_path=str(folder / "logs" / "predictions.npy"),
        pictures_path=str(folder / "logs" / "pictures.npz"),
        checkpoint_path=str(folder / "checkpoint"),
        checkpoint_seconds=1e9,
        timeout_seconds=120,
        launched=time.time(),
        profile_path=str(folder / "logs" / "profile"),
        log_gradients=True,
    )
    info = RunInfo(
        name="20260101-000000-digits",
        tracking_id="0123abcd-4567cdef",
        attempt=1,
        recipe="package.module:Classifier",
        settings=hp,
        options=RunOptions(tracking="off", profile=True, log_gradients=True),
        data=folder / "data",
        description=description,
        data_seconds=0.5,
        logs=folder / "logs",
        surroundings=surroundings(),
    )
    events: list[Any] = []
    results = launcher.launch("flyte_ddp.engine.worker:run", choose_world("gloo", 2, 64), job, 120, events.append)
    events.append(RunFinished(results, Path(job.predictions_path), time.time() - job.launched))
    (folder / "recorded.pickle").write_bytes(pickle.dumps(Recorded(info, events)))


@pytest.fixture
def recorded_file(recorded: Recorded) -> Path:
    """The same, for another process."""
    return recorded.info.logs.parent / "recorded.pickle"
