"""Sends a SIGTERM in each phase of a training, starts it again, and says what that has cost: a table of
`python -m benchmarks.faults`."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.errors import RecoverableError
from flyte_ddp.events import Event, RunStarted, StepLogged
from tests.engine import test_notices
from tests.lightning.project import settings, write_project
from tests.lightning.project import train as train_module
from tests.small_training import trainer, write_small

SENT = "DDP_TEST_SENT"  # where the time of a notice is left
STEPS_AND_LOG = {"log_interval": 1}
OWN_LOOP = {"recipe": "tests.engine.notices:own_loop", **test_notices.OWN, **STEPS_AND_LOG}
RECIPE = {**test_notices.RECIPE, **STEPS_AND_LOG}
# By door what sends the notice, and by phase where: "evaluation 3" is its third batch on the last rank
DOORS: dict[str, dict[str, str]] = {
    "recipe": {
        "set-up": "set-up 1", "trial": "trial 2", "step": "step 7", "evaluation": "evaluation 3",
        "evaluation of the test split": "evaluation 19", "results": "results 2",
    },
    "own loop": {"step": "step 3", "evaluation": "evaluation 3", "evaluation after the last epoch": "evaluation 25"},
    "LightningModule": {"step": "step 4", "validation": "validation 2", "test": "test 2"},
}  # fmt: skip


@dataclass
class Notice:
    """A notice, and what came of it.

    Attributes:
        door, phase: where it came.
        seconds: until the training had ended.
        lost: steps that the resume computed again.
        is_identical: whether the resume ended with the digest of an undisturbed training.
    """

    door: str
    phase: str
    seconds: float
    lost: int
    is_identical: bool


def notices() -> list[Notice]:
    """Send one in each phase for each door."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="ddp-notices-") as name:
        place = Path(name)
        data = write_small(place / "data")
        write_project(place)
        sys.path.insert(0, str(place))
        trainings = {
            "recipe": lambda folder, listen: trainer(data, place)(2, name=folder, on_event=listen, **RECIPE),
            "own loop": lambda folder, listen: trainer(data, place)(2, name=folder, on_event=listen, **OWN_LOOP),
            "LightningModule": lambda folder, listen: _module(place / folder, listen),
        }
        for door, phases in DOORS.items():
            train = trainings[door]
            undisturbed = train(f"{door} undisturbed", _ignore).result.digest
            for phase, where in phases.items():
                print(f"\rnotice: {door}, {phase:<40}", end="", file=sys.stderr, flush=True)
                rows.append(_send(train, door, phase, where, place / "sent", undisturbed))
    print(file=sys.stderr)
    return rows


def _module(folder: Path, listen: Callable[[Event], None]) -> Any:
    return train_module(
        folder, settings(epochs=2, log_interval=1), "numerals.variants:Noticed", "numerals.loaders:Evaluated",
        on_event=listen,
    )  # fmt: skip


def _ignore(event: Event) -> None:
    pass


def _send(train: Callable[..., Any], door: str, phase: str, where: str, sent: Path, undisturbed: str) -> Notice:
    done = begun = steps = 0

    def listen(event: Event) -> None:
        nonlocal done, begun, steps
        if isinstance(event, RunStarted):
            steps = event.steps_per_epoch or 0
            begun = event.first_epoch * steps + event.first_step
        elif isinstance(event, StepLogged):
            done = event.epoch * steps + event.step

    variables = {
        "DDP_TEST_PHASE": where, "NUMERALS_NOTICE": where, "DDP_TEST_LAUNCHER": str(os.getpid()),
        "DDP_TEST_RANK": "0" if phase == "results" else "1", SENT: str(sent),
    }  # fmt: skip
    with _environment(variables):
        with suppress(RecoverableError):
            train(f"{door} {phase}", listen)
        seconds = time.time() - float(sent.read_text())
    before, done = done, 0
    again = train(f"{door} {phase}", listen)
    lost = before - begun if begun < before else 0
    return Notice(door, phase, seconds, lost, again.result.digest == undisturbed)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def table(rows: list[Notice]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| door | phase of the notice | seconds until the end | steps lost | digest equal |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.door} | {row.phase} | {row.seconds:.1f} | {row.lost} | {'yes' if row.is_identical else '**no**'} |"
        for row in rows
    ]
    return "\n".join(lines)
