"""The observer that passes events to a tracker, under which names, and from which step on after a resume."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.events import EpochChosen, EpochFinished, GradientsSeen, Observer, RunStarted, StepLogged
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.report.background import Background
from flyte_ddp.report.console import say
from flyte_ddp.report.goodput import compute_goodput
from flyte_ddp.report.mlflow_run import MODEL, MlflowRun
from flyte_ddp.report.predictions import load_predictions
from flyte_ddp.report.record import RunFailed, RunFinished, RunInfo, step_figures
from flyte_ddp.report.tensorboard import TensorBoard
from flyte_ddp.report.tracker import Tracker, first_part, rename_taken
from flyte_ddp.report.wandb_run import WandbRun, has_key

TRACKERS: dict[str, type[Tracker]] = {  # by the values of RunOptions.tracking
    "online": WandbRun,
    "offline": WandbRun,
    "tensorboard": TensorBoard,
    "mlflow": MlflowRun,
}
CLOSE_SECONDS = 30.0  # how long the end of a run waits for its tracker
DIGEST = "weights_digest"


class Tracking(Observer):
    """An observer that logs a run to a tracker. Steps that a resumed training repeats are logged once."""

    def __init__(self, info: RunInfo, tracker: Tracker, folder: Path):
        """Open the tracker's run.

        Args:
            info: the run.
            tracker: the tracker.
            folder: has report.html and model.pt when the run ends.
        """
        self._info = info
        self._tracker = tracker
        self._folder = folder
        self._steps_per_epoch = 1
        self._step = 0
        self._logged: dict[str, int] = {}  # the last step of each name: a script may tell a step's figures one by one
        self._has_succeeded = False
        tracker.open(run_parameters(info))

    def on_run_started(self, event: RunStarted) -> None:
        self._steps_per_epoch = event.steps_per_epoch or 0
        self._step = event.first_epoch * self._steps_per_epoch + event.first_step
        self._tracker.describe(attempt_world(event), event.layers)

    def on_step_logged(self, event: StepLogged) -> None:
        self._step = event.epoch * self._steps_per_epoch + event.step
        values = _named("train", {**event.measures, **rename_taken(event.measures, step_figures(event))})
        if self._info.options.log_gradients:
            values |= _named("gradient_norm", event.gradient_norms)
        epoch = {"epoch": self._step / self._steps_per_epoch} if self._steps_per_epoch else {}
        self._log({**values, **epoch})

    def on_gradients_seen(self, event: GradientsSeen) -> None:
        if self._is_new("gradients"):
            self._tracker.histograms(self._step, _named("gradients", event.histograms))
            self._logged["gradients"] = self._step

    def on_epoch_finished(self, event: EpochFinished) -> None:
        self._step = round(event.position * self._steps_per_epoch)
        values = _named(event.split, event.evaluated) | _named("train_epoch", event.train)
        values |= {"seconds/train": event.train_seconds, "seconds/evaluate": event.evaluate_seconds}
        digest = {DIGEST: event.digest} if event.digest else {}
        self._log({**values, "epoch": event.position, **digest})

    def on_epoch_chosen(self, event: EpochChosen) -> None:
        self._log(_named("test", event.measures))
        # By step they may be missing: a loop of a user's own may have measured the last epoch on the test split, too
        self._tracker.summary({"best_epoch": event.position, "tested": dict(event.measures)})

    def on_run_finished(self, event: RunFinished) -> None:
        self._has_succeeded = True
        predictions = load_predictions(self._info, event)
        if predictions and self._is_new("predictions"):
            self._tracker.predictions(self._step, predictions)
        result = event.results[0]
        metadata = read_metadata(self._folder / "model.pt")
        self._tracker.summary(
            {
                "total_seconds": event.total_seconds,
                "goodput": compute_goodput(event.seconds),
                "seconds": event.seconds,
                DIGEST: result.digest,
                "warnings": [warning.reason for warning in result.warnings],
                "peak_memory": [rank.peak_bytes for rank in event.results],
                "peak_gpu_memory": [rank.peak_gpu_bytes for rank in event.results],
                **({MODEL: metadata.digest} if metadata else {}),
            }
        )

    def on_run_failed(self, event: RunFailed) -> None:
        self._tracker.summary({"failure": event.reason})

    def close(self) -> None:
        self._tracker.finish(self._has_succeeded, self._folder / "report.html")

    def _log(self, values: Mapping[str, Any]) -> None:
        """Log the values at the newest step, without those that have this step or a later one already."""
        new = {name: value for name, value in values.items() if self._is_new(name)}
        if new:
            self._tracker.log(self._step, new)
            self._logged |= dict.fromkeys(new, self._step)

    def _is_new(self, name: str) -> bool:
        return self._step > self._logged.get(name, -1) and not self._tracker.has_logged(first_part(name), self._step)


def open_tracker(info: RunInfo, folder: Path, on_url: Callable[[str], None]) -> Background | None:
    """Start the tracker that options.tracking asks for, in a thread of its own; return None if it asks for none.

    The caller passes the run's events to the returned observer, and closes the observer. choose_tracking() decides what
    "auto" asks for.

    Args:
        info: the run.
        folder: the folder that has report.html and model.pt when the run ends.
        on_url: on_url(url) is called, in that thread, once the URL of the tracker's run is known.

    Raises:
        InputError: the tracker is not installed, or has no address.
    """
    wish = choose_tracking(info.options.tracking)
    if wish == "off":
        return None
    info = dataclasses.replace(info, options=dataclasses.replace(info.options, tracking=wish))
    tracker = TRACKERS[wish](info, on_url)
    return Background(tracker.label, lambda: Tracking(info, tracker, folder), CLOSE_SECONDS, abandon=tracker.abandon)


def choose_tracking(wish: str) -> str:
    """Return the kind of tracking for RunOptions.tracking: `wish` itself, unless that is "auto".

    With a key for W&B, "auto" stands for "offline" if WANDB_MODE is offline, for "off" if WANDB_MODE is disabled, and
    otherwise for "online". Without a key, it stands for "off", and a message is printed.
    """
    if wish != "auto":
        return wish
    if has_key():
        return {"offline": "offline", "disabled": "off"}.get(os.environ.get("WANDB_MODE", ""), "online")
    say("Tracking is off: set WANDB_API_KEY for Weights & Biases, or the option tracking, such as to tensorboard")
    return "off"


def _named(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{group}/{name}": value for name, value in values.items()}


def run_parameters(info: RunInfo) -> dict[str, Any]:
    """Return the values that determine the result, which are the same for all attempts."""
    data = {"data_digest": info.description.digest} if info.description else {}
    settings = dataclasses.asdict(info.settings)
    return {**settings, **rename_taken(settings, {"recipe": info.recipe, **data})}


def attempt_world(event: RunStarted) -> dict[str, Any]:
    """Return the machine that an attempt runs on, by name."""
    machine = event.ran_on[-1] if event.ran_on else {}
    known = {name: machine[name] for name in ("hardware", "torch", "threads") if name in machine}
    return known | {name: getattr(event, name) for name in ("world_size", "backend", "device", "precision", "dataset")}
