"""Events that the ranks, nearly always rank 0, send to the parent: small, plain values; large data stays in files."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


class Event:
    """Base of the events below."""


@dataclass(frozen=True)
class StartUp(Event):
    """The ranks are not ready yet: what they are doing from now on, as in "reading the data"."""

    doing: str


@dataclass(frozen=True)
class RunStarted(Event):
    """The ranks have met and the first step is next (first_epoch and first_step are above 0 after a resume).

    Attributes:
        samples: what the samples are called, in the plural: images.
        headline: the name of the run's main measure besides its loss.
        percent: names of the measures from 0 to 1 that are shown in per cent.
        layers: name, type and number of parameters of each module that has parameters of its own.
        validation_samples: 0 where each epoch is evaluated on the test split.
        remarks: which weights training starts with, which of them are frozen, and the micro_batch that fits.
        hosts: of each rank.
        identity: by name, what determines the result: settings, recipe, and digests of data, code and init.
        ran_on: the hardware, torch, precision, ranks, threads and the like now, and before it those before a resume.
        earlier: position and digest of each evaluation before a resume, as EpochFinished had them.
        may_end_early: whether training may end before its last epoch, by early stopping.
    """

    dataset: str
    samples: str
    headline: str
    percent: tuple[str, ...]
    train_samples: int
    test_samples: int
    samples_per_epoch: int
    world_size: int
    backend: str
    device: str
    precision: str
    epochs: int
    steps_per_epoch: int
    first_epoch: int
    first_step: int
    startup_seconds: float
    layers: list[tuple[str, str, int]]
    validation_samples: int = 0
    remarks: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    ran_on: list[dict[str, Any]] = field(default_factory=list)
    earlier: list[tuple[float, str]] = field(default_factory=list)
    may_end_early: bool = False


@dataclass(frozen=True)
class StepLogged(Event):
    """State after a step: the measures, including "loss", cover all training samples since the last such event.

    seconds_left: until the end of the last evaluation, at the pace of this attempt, see report/observers.py; None in
    its first seconds, and before the event has left the ranks.
    """

    epoch: int
    step: int
    samples: int
    measures: dict[str, float]
    learning_rate: float
    samples_per_second: float
    gradient_norms: dict[str, float]  # Euclidean, of this step: the ten largest by parameter, or all on request
    gradient_norm: float = 0.0  # of all parameters together
    seconds_left: float | None = None


@dataclass(frozen=True)
class EpochFinished(Event):
    """An epoch's training and evaluation: measures by name, of the training samples, and of the validation samples or,
    where there are none, of the test samples. With several evaluations per epoch, one of them and the training before.

    Attributes:
        fraction: how much of the epoch had been trained.
        digest: of the weights that were evaluated, 16 hex digits: equal bits have equal digests.
    """

    epoch: int
    samples: int
    train: dict[str, float]
    test: dict[str, float]
    train_seconds: float
    evaluate_seconds: float
    validation: dict[str, float] = field(default_factory=dict)
    fraction: float = 1.0
    digest: str = ""

    @property
    def position(self) -> float:
        """Return the position in epochs: 1.25 after a quarter of the second."""
        return self.epoch + self.fraction

    @property
    def split(self) -> str:
        """Return what the epoch was evaluated on."""
        return "validation" if self.validation else "test"

    @property
    def evaluated(self) -> dict[str, float]:
        return self.validation or self.test


def digests_of(epochs: Iterable[EpochFinished]) -> list[tuple[float, str]]:
    """Position and digest of each evaluation."""
    return [(epoch.position, epoch.digest) for epoch in epochs]


@dataclass(frozen=True)
class EpochChosen(Event):
    """The single evaluation on the test split, with the weights of the best epoch on the validation split.

    Attributes:
        epoch: the best one, from 0.
        epochs: how many were trained.
        stopped_early: whether training ended before settings.epochs because patience ran out.
        is_best: False where there was no choice: the epoch is the last one.
        fraction: how much of the best epoch had been trained, see EpochFinished.
    """

    epoch: int
    epochs: float
    measures: dict[str, float]
    stopped_early: bool
    seconds: float
    is_best: bool = True
    fraction: float = 1.0

    @property
    def position(self) -> float:
        """Return the position in epochs, as that of EpochFinished."""
        return self.epoch + self.fraction


@dataclass(frozen=True)
class NotLearning(Event):
    """At this step training does not learn as it should, but continues. The reason ends with remedies."""

    epoch: int
    step: int
    reason: str


@dataclass(frozen=True)
class RanksTimed(Event):
    """Seconds of each rank since this attempt began, by rank: waiting for its data (reading and augmenting them),
    computing, waiting for the others and exchanging gradients with them, and what it needed beyond a fast rank, for
    which the others have waited.
    """

    data: list[float]
    computing: list[float]
    waiting: list[float]
    waited_for: list[float]


@dataclass(frozen=True)
class SlowRank(Event):
    """By this step the others have been waiting for a rank. The reason ends with what to look at.

    Attributes:
        cause: data or compute.
    """

    epoch: int
    step: int
    reason: str
    rank: int
    host: str
    cause: str


Warned = NotLearning | SlowRank  # what ends up among a run's warnings


@dataclass(frozen=True)
class GradientsSeen(Event):
    """Distribution of each parameter's gradient in an epoch's last step: counts of n bins between n + 1 edges."""

    epoch: int
    histograms: dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """There is a complete checkpoint of the state before this step at path.

    Training stood still for stall_seconds; the write itself, in the background, took write_seconds.
    """

    epoch: int
    step: int
    path: str
    stall_seconds: float
    write_seconds: float


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; training continues without it."""

    reason: str


@dataclass(frozen=True)
class CheckpointRefused(Event):
    """There was a checkpoint, but training started afresh, for this reason."""

    reason: str


@dataclass(frozen=True)
class RanksRestarted(Event):
    """The ranks of this pod have ended, for this reason, and start again from the newest checkpoint; left: how often
    that may happen again.
    """

    reason: str
    left: int


@dataclass(frozen=True)
class Printed(Event):
    """A line that a rank's code, or a library, has printed."""

    rank: int
    text: str


def tell(observer: object, event: Any) -> None:
    """Call the observer's method for this kind of event, if it has one: on_epoch_finished for EpochFinished."""
    name = re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", type(event).__name__)
    method = getattr(observer, f"on{name}", None)
    if method:
        method(event)


def all_of(*listeners: Callable[[Any], None]) -> Callable[[Any], None]:
    """Pass each event to all listeners."""

    def tell_all(event: Any) -> None:
        for listener in listeners:
            listener(event)

    return tell_all


class Observer:
    """Is called with each event, and has a method for each kind that concerns it: see tell."""

    def __call__(self, event: Any) -> None:
        tell(self, event)

    def close(self) -> None:
        """Nothing more will happen."""
