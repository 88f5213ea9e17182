"""One small real training, profiled, on data whose names mean harm, and everything that was said of it."""

import pickle
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flyte_ddp.code.user_code import find_code
from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.prepared.writer import write_prepared
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.engine.job import PREDICTIONS, make_job, make_subject
from flyte_ddp.events import StartUp
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.article import document
from flyte_ddp.report.record import Record, RunFinished, RunInfo
from flyte_ddp.report.report import fragment
from flyte_ddp.settings import RunOptions
from tests.once import made_once

HOSTILE = """<script>alert(1)</script>"'&{{ 7 * 7 }}"""
HOSTILE_CLASS = "<img src=x onerror=alert(2)>"


class Recorded(NamedTuple):
    info: RunInfo
    events: list[Any]  # RunStarted, what followed, and RunFinished

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
    options = RunOptions(tracking="off", profile=True, log_gradients=True, checkpoint_seconds=1e9)
    code, logs = find_code("flyte_ddp.recipes.images:ImageClassifier"), folder / "logs"
    subject = make_subject(code, hp, folder / "data", description=description)
    job = make_job(subject, options, model_path=folder / "model.pt", checkpoint_path=folder / "checkpoint", logs=logs)
    info = RunInfo(
        name="20260101-000000-digits",
        tracking_id="0123abcd-4567cdef",
        attempt=1,
        recipe="package.module:Classifier",
        settings=hp,
        options=options,
        data=folder / "data",
        description=description,
        logs=logs,
        checkpoint="s3://bucket/run/_flytecheckpoints",
    )
    events: list[Any] = []
    results = launcher.launch("flyte_ddp.engine.worker:run", choose_world("gloo", 2, 64), job, 120, events.append)
    events = [event for event in events if not isinstance(event, StartUp)]
    events.append(RunFinished(results, logs / PREDICTIONS, time.time() - job.launched))
    (folder / "recorded.pickle").write_bytes(pickle.dumps(Recorded(info, events)))


@pytest.fixture
def recorded_file(recorded: Recorded) -> Path:
    """The same, for another process."""
    return recorded.info.logs.parent / "recorded.pickle"


def page_of(record: Record) -> str:
    return document(record.title, fragment(record))


@pytest.fixture(scope="session")
def page(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    record = recorded.record
    record.tracking_url = "https://wandb.example/run?a=1&b=2"
    path.write_text(page_of(record), encoding="utf-8")
    return path
