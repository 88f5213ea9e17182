"""The facts of a training run that a report shows, collected from its events and computed from them."""

import copy
import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from flyte_ddp import events
from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.engine.job import PREDICTIONS, KeptModel, TrainingResult
from flyte_ddp.launch.failures import describe_error
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.words import format_measure, start_position
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.text import shortened

MOST_STEPS = 1024  # how many steps of a long run are kept, evenly spread: more than a curve can show
MOST_NOTES = 50
POSITION = ("epoch", "step", "samples", "seconds_left")  # the fields that say where a step is
MOST_CHARACTERS = 2000  # the length of a note, or of the failure: a rank may print a line of any length


@dataclass(frozen=True)
class RunFinished:
    """The parent's own event that training has succeeded, and its files are in place.

    Attributes:
        results: the result of each rank.
        predictions_path: .npy of the recipe's predictions, an image classifier's log-probabilities (N, classes); None
            if there are none.
        total_seconds: the seconds of the task so far.
        seconds: the seconds of all attempts, by the causes in goodput.py.
    """

    method = "on_run_finished"

    results: list[TrainingResult]
    predictions_path: Path | None
    total_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, results: list[TrainingResult], logs: Path, goodput: Goodput) -> "RunFinished":
        predictions = logs / PREDICTIONS
        seconds = time.time() - goodput.attempts[-1].began
        return cls(results, predictions if predictions.exists() else None, seconds, goodput.seconds)


@dataclass(frozen=True)
class RunFailed:
    """The parent's own event that training has ended with this message."""

    method = "on_run_failed"

    reason: str

    @classmethod
    def by(cls, error: BaseException) -> "RunFailed":
        if isinstance(error, KeyboardInterrupt):
            return cls("stopped by Ctrl-C")
        return cls((describe_error(error).splitlines() or [type(error).__name__])[0])


def step_figures(step: events.StepLogged) -> dict[str, float]:
    """Return the numbers of a step by name: all but its measures and its position."""
    values = {field.name: getattr(step, field.name) for field in fields(step) if field.name not in POSITION}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def tracking_id(key: str, first: str) -> str:
    """Return the id of a tracker's run: 8 hex digits, a hyphen and 8 hex digits.

    Args:
        key: the digest of what determines the training's result, in hex.
        first: a text that all attempts at a training have in common, and no other training has.
    """
    return f"{key[:8]}-{hashlib.sha256(first.encode(errors='backslashreplace')).hexdigest()[:8]}"


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run that are known before it starts.

    Attributes:
        name: the name of the run, for people to read.
        tracking_id: the id of the tracker's run, the same for all attempts at this training.
        attempt: the number of earlier attempts on the cluster.
        recipe: what is trained, as package.module:Name.
        data: the folder of the prepared dataset, for this library's image classifiers alone.
        description: the description of that dataset.
        logs: the folder for the files of trackers and profiler.
        checkpoint: the folder of the checkpoint, as options.resume_from takes it.
    """

    name: str
    tracking_id: str
    attempt: int
    recipe: str
    settings: TrainingSettings
    options: RunOptions
    data: Path | None
    description: DatasetDescription | None
    logs: Path
    checkpoint: str

    @property
    def is_stand_in(self) -> bool:
        asked = getattr(self.settings, "dataset", "")
        return asked == "auto" and self.description is not None and self.description.name == "digits"

    @property
    def recipe_name(self) -> str:
        return self.recipe.rpartition(":")[2]


@dataclass
class Record(events.Observer):
    """The run so far, collected from its events.

    Attributes:
        doing: what the ranks are doing while they start.
        newest: the newest step, with the newest value of each measure that any step has.
        seconds_left: the newest estimate of the time left.
    """

    info: RunInfo
    goodput: Goodput = field(default_factory=lambda: Goodput(time.time()))
    doing: str = ""
    started: events.RunStarted | None = None
    steps: list[events.StepLogged] = field(default_factory=list)
    newest: events.StepLogged | None = None
    epochs: list[events.EpochFinished] = field(default_factory=list)
    warnings: list[events.Warned] = field(default_factory=list)
    finished: RunFinished | None = None
    tested: events.EpochChosen | None = None
    ranks: events.RanksTimed | None = None
    failure: str = ""
    seconds_left: float | None = None
    checkpoints: int = 0
    stall_seconds: float = 0.0
    write_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    tracking_url: str = ""
    _every: int = 1  # one in this many logged steps is kept
    _seen: Counter[tuple[str, ...]] = field(default_factory=Counter)  # steps by the names of their measures

    def __call__(self, event: Any) -> None:
        self.goodput(event)
        super().__call__(event)

    def on_start_up(self, event: events.StartUp) -> None:
        self.doing = event.doing

    def on_run_started(self, event: events.RunStarted) -> None:
        self.started = event
        first = (event.first_epoch, event.first_step)
        self.seconds_left = None
        # The steps after this position will come again
        self.steps = [step for step in self.steps if (step.epoch, step.step) <= first]
        known = {position for position, _ in event.earlier}
        self.epochs = [epoch for epoch in self.epochs if epoch.position in known]
        for remark in event.remarks:
            self._note(f"{remark}.")
        if event.first_epoch or event.first_step:
            begin = "" if self.steps else ", where the curves of steps begin"
            position = start_position(event)
            self._note(f"Resumed from a checkpoint{' at ' * bool(position)}{position}{begin}.")

    def on_step_logged(self, event: events.StepLogged) -> None:
        self.seconds_left = event.seconds_left
        known = self.newest.measures if self.newest else {}
        self.newest = replace(event, measures={**known, **event.measures})
        # A script may measure one thing in one step, and another in the next, so each kind of steps is thinned out
        if _is_turn(event, self._seen, self._every):
            self.steps.append(event)
        if len(self.steps) > MOST_STEPS:
            seen: Counter[tuple[str, ...]] = Counter()
            self.steps = [step for step in self.steps if _is_turn(step, seen, 2)]
            self._every = self._every * 2

    def on_epoch_finished(self, event: events.EpochFinished) -> None:
        self.epochs.append(event)

    def on_epoch_chosen(self, event: events.EpochChosen) -> None:
        self.tested = event

    def on_not_learning(self, event: events.Warned) -> None:
        self.warnings.append(event)

    on_slow_rank = on_not_learning

    def on_ranks_timed(self, event: events.RanksTimed) -> None:
        self.ranks = event

    def on_checkpoint_written(self, event: events.CheckpointWritten) -> None:
        self.checkpoints += 1
        self.stall_seconds += event.stall_seconds
        self.write_seconds += event.write_seconds

    def on_checkpoint_failed(self, event: events.CheckpointFailed) -> None:
        self._note(f"A checkpoint could not be written: {event.reason}")

    def on_checkpoint_refused(self, event: events.CheckpointRefused) -> None:
        self._note(f"Started afresh: {event.reason}")

    def on_ranks_restarted(self, event: events.RanksRestarted) -> None:
        self._note(f"The ranks were started again: {event.reason}")

    def on_printed(self, event: events.Printed) -> None:
        self._note(f"Rank {event.rank} printed: {event.text}")

    def on_run_finished(self, event: RunFinished) -> None:
        # The result also has the epochs and warnings before a resume
        self.finished = event
        self.epochs = list(event.results[0].epochs)
        self.warnings = list(event.results[0].warnings)

    def on_run_failed(self, event: RunFailed) -> None:
        self.failure = shortened(event.reason, MOST_CHARACTERS)

    def so_far(self) -> "Record":
        """Return a copy that stays as it is, for another thread to read."""
        lists: dict[str, Any] = {name: list(getattr(self, name)) for name in ("steps", "epochs", "warnings", "notes")}
        return replace(self, goodput=copy.deepcopy(self.goodput), **lists)

    @property
    def status(self) -> str:
        if self.failure:
            return "Failed"
        if self.finished:
            return "Finished"
        if self.started and not self.started.epochs:
            return "Training"
        if self.started:
            done = int(self.epochs[-1].position) if self.epochs else self.started.first_epoch
            return f"Training, epoch {done + 1} of {self.info.settings.last_epoch}"
        return f"Starting, {self.doing}" if self.doing else "Starting"

    @property
    def title(self) -> str:
        return f"{self.status}: training {self.subject}"

    @property
    def subject(self) -> str:
        """Return what is trained on: "on DATASET", or "of RECIPE" while the dataset is unknown."""
        if self.info.description:
            return f"on {self.info.description.name}"
        if self.started and self.started.epochs:
            return f"on {self.started.dataset}"
        return f"of {self.info.recipe_name}"

    @property
    def samples(self) -> str:
        """Return what the samples are called, in the plural."""
        return self.started.samples if self.started else "samples"

    @property
    def split(self) -> str:
        """Return the name of the split that each epoch is evaluated on."""
        if self.epochs:
            return self.epochs[-1].split
        return "validation" if self.started and self.started.validation_samples else "test"

    @property
    def headline(self) -> str:
        return self.started.headline if self.started else "loss"

    @property
    def slow_ranks(self) -> list[events.SlowRank]:
        return [warning for warning in self.warnings if isinstance(warning, events.SlowRank)]

    @property
    def problems(self) -> list[events.NotLearning]:
        """Return the warnings that doubt the result. A slow rank only takes time."""
        return [warning for warning in self.warnings if isinstance(warning, events.NotLearning)]

    @property
    def kept(self) -> list[KeptModel]:
        """Return the best evaluations, whose weights are in the logs; empty until training has finished."""
        return self.finished.results[0].kept if self.finished else []

    @property
    def digest(self) -> str:
        """Return the digest of the weights that were evaluated last or, in the end, of those that are returned."""
        last = self.finished.results[0].digest if self.finished else ""
        return last or (self.epochs[-1].digest if self.epochs else "")

    @property
    def measures(self) -> list[str]:
        """Return the names of the run's measures, without duplicates: the headline, "loss", then all others.

        The headline and "loss" are there even if nothing has measured them. The others are those of `epochs`, the last
        epoch first, and then those of `steps`.
        """
        measured = [*chain.from_iterable((epoch.evaluated, epoch.train) for epoch in reversed(self.epochs))]
        measured += [step.measures for step in self.steps]
        return list(dict.fromkeys([self.headline, "loss", *chain.from_iterable(measured)]))

    def format_measure(self, name: str, measures: Mapping[str, float]) -> str:
        """Format a measure's value for people; a dash if there is none."""
        percent = self.started.percent if self.started else ()
        return format_measure(name, measures[name], percent) if name in measures else "-"

    def position(self, step: events.StepLogged | events.Warned) -> float:
        """Return the position of a step in epochs, or in steps without epochs; 0.0 before the run has started."""
        return step.epoch + step.step / (self.started.steps_per_epoch or 1) if self.started else 0.0

    def _note(self, text: str) -> None:
        if len(self.notes) < MOST_NOTES:
            self.notes.append(shortened(text, MOST_CHARACTERS))


def _is_turn(step: events.StepLogged, seen: Counter[tuple[str, ...]], every: int) -> bool:
    """Count a step among those with the same measures, in `seen`, and return whether it is the next one of `every`."""
    kind = tuple(step.measures)
    seen[kind] += 1
    return seen[kind] % every == 0
