"""What trackers share: the parameters of a training, and its numbers by name, each at its step."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from flyte_ddp.events import EpochChosen, EpochFinished, Observer, RunStarted, StepLogged
from flyte_ddp.report.record import RunInfo

DIGEST = "weights_digest"


class Tracker(Observer, ABC):
    """Passes the numbers of each event on, by their group."""

    def __init__(self, info: RunInfo):
        self._info, self._steps_per_epoch = info, 1

    def on_run_started(self, event: RunStarted) -> None:
        self._steps_per_epoch = event.steps_per_epoch

    def on_step_logged(self, event: StepLogged) -> None:
        step = event.epoch * self._steps_per_epoch + event.step
        self._scalars(step, "train", {**event.measures, **apart(event.measures, figures_of(event))})
        if self._info.options.log_gradients:
            self._scalars(step, "gradient_norm", event.gradient_norms)

    def on_epoch_finished(self, event: EpochFinished) -> None:
        self._scalars(self._step(event), event.split, event.evaluated)
        self._digest(self._step(event), event.digest)

    def on_epoch_chosen(self, event: EpochChosen) -> None:
        self._scalars(self._step(event), "test", event.measures)

    def _step(self, event: EpochFinished | EpochChosen) -> int:
        return round(event.position * self._steps_per_epoch)

    @abstractmethod
    def _scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """Writes each value as group/name."""

    @abstractmethod
    def _digest(self, step: int, digest: str) -> None:
        """Writes that of the weights at this step."""


def figures_of(event: StepLogged) -> dict[str, float]:
    return {name: getattr(event, name) for name in ("learning_rate", "samples_per_second", "gradient_norm")}


def parameters_of(info: RunInfo) -> dict[str, Any]:
    """What determines the result, the same for all attempts."""
    data = {"data_digest": info.description.digest} if info.description else {}
    settings = asdict(info.settings)
    return {**settings, **apart(settings, {"recipe": info.recipe, **data})}


def apart(taken: Collection[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Ours, each under a name that no setting or measure of the user's has already: recipe, or run.recipe."""
    return {f"run.{name}" if name in taken else name: value for name, value in ours.items()}


def world_of(event: RunStarted) -> dict[str, Any]:
    """What an attempt runs on."""
    names = ("world_size", "backend", "device", "precision", "dataset")
    machine = event.ran_on[-1] if event.ran_on else {}
    known: dict[str, Any] = {name: machine[name] for name in ("hardware", "torch", "threads") if name in machine}
    return {**known, **{name: getattr(event, name) for name in names}}
