"""The project of docs/lightning.md in a folder, with variants of it, and trainings of them by real ranks."""

import os
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch

from flyte_ddp.engine.job import TrainingResult, make_job
from flyte_ddp.events import CheckpointWritten, Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, choose_world
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.lightning.settings import LightningOptions, LightningSettings
from flyte_ddp.lightning.task import LightningTraining
from flyte_ddp.settings import TrainingSettings
from tests.commands import ROOT


class Trained(NamedTuple):
    result: TrainingResult
    weights: dict[str, torch.Tensor]
    events: list[Event]


def write_project(folder: Path) -> None:
    text = (ROOT / "docs" / "lightning.md").read_text()
    for block, name in re.findall(r"^```python\n(# (\S+\.py)\n.*?)^```", text, re.MULTILINE | re.DOTALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(block)
    for name in ("variants.py", "loaders.py"):
        shutil.copy(Path(__file__).with_name(name), folder / "numerals")


def train(
    folder: Path,
    settings: LightningSettings,
    module: str = "numerals.model:LitNumerals",
    data: str = "numerals.model:Numerals",
    nproc: int = 2,
    on_event: Callable[[Event], None] = lambda event: None,
    headline: str = "val_accuracy",
    callbacks: str = "",
    target: str = "flyte_ddp.lightning.rank:run",
    here: Callable[..., TrainingResult] | None = None,
    **options: Any,
) -> Trained:
    """One training; those in the same folder share a checkpoint. The project is on sys.path.

    here: what trains in this process, as the only rank, in place of ranks.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    training, chosen = LightningTraining(module, data, callbacks, headline), LightningOptions(**options)
    paths = folder / "model.pt", folder / "checkpoint", folder / "logs"
    job = training.job_of_ranks(make_job(training.subject(cast(TrainingSettings, settings), None), chosen, *paths))
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        on_event(event)

    if here:
        alone = Environment(choose_world("gloo", 1, 100), 0, 0, f"file://{folder}/store", threads=1)
        threads = torch.get_num_threads()
        with patch.dict(os.environ):  # a rank sets torchrun's variables
            result = here(alone, DirectLink(listen), job)
        torch.set_num_threads(threads)
    else:
        world = choose_world("gloo", nproc, 100)
        result = launcher.launch(target, world, job, 120, listen, training.preload, root=training.code.root)[0]
    return Trained(result, torch.load(folder / "model.pt", weights_only=True), events)


class KilledError(Exception):
    """Ends the parent, and so all ranks by SIGKILL."""


def kill() -> None:
    raise KilledError


def settings(**values: Any) -> Any:
    kind = import_module("numerals.settings").Settings
    return kind(**{"epochs": 3, "width": 16, **values})


def at_checkpoint(number: int, do: Callable[[], None]) -> Callable[[Event], None]:
    """Does something when the checkpoint of this number, from 1, has been written."""
    seen: list[Event] = []

    def on_event(event: Event) -> None:
        seen.extend([event] * isinstance(event, CheckpointWritten))
        if len(seen) == number and isinstance(event, CheckpointWritten):
            do()

    return on_event


def of(kind: type, trained: Trained) -> list[Any]:
    return [event for event in trained.events if isinstance(event, kind)]
