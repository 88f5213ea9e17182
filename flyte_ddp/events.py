"""Events that ranks, nearly always rank 0, send to the parent: small, plain values. Large data stays in files.

Epochs count from 0. A step's number is how many steps of its epoch are done.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar


class Event:
    """The base of all events.

    Attributes:
        method: the name of the method by which observers take the event.
    """

    method: ClassVar[str]


@dataclass(frozen=True)
class StartUp(Event):
    """An occupation of ranks that are not ready yet, such as "reading the data"."""

    method = "on_start_up"

    doing: str


@dataclass(frozen=True)
class RunStarted(Event):
    """The ranks have met, and the first step is next. After a resume, first_epoch or first_step is above 0.

    Attributes:
        samples: what the samples are called, in the plural, such as "images".
        headline: the name of the run's main measure besides its loss.
        epochs, steps_per_epoch: None for a script, which tells steps alone, with 0 as their epoch.
        percent: names of the measures from 0 to 1 that are shown in per cent.
        layers: name, type and number of parameters of each module that has parameters of its own.
        validation_samples: the size of the validation split; 0 if each epoch is evaluated on the test split.
        remarks: sentences on the initial weights, on frozen weights, and on the micro_batch that fits.
        hosts: the host of each rank.
        identity: everything that determines the result, by name: settings, recipe, and digests of data, code and init.
        ran_on: hardware, torch version, precision, ranks, threads and so on: of the runs before a resume, then of this
            run.
        earlier: position and digest of each evaluation before a resume, as in EpochFinished.
        may_end_early: whether early stopping may end training before its last epoch.
    """

    method = "on_run_started"

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
    epochs: int | None
    steps_per_epoch: int | None
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
    """The state after a step. The measures, among them "loss", cover all training samples since the last StepLogged.

    Attributes:
        learning_rate, samples_per_second: None in a script's steps, whatever their type.
        gradient_norms: Euclidean norms of this step's gradients by parameter: the ten largest, or all on request.
        gradient_norm: the Euclidean norm of all gradients together; None in a script's steps.
        tokens_per_second: of all ranks together; None where tokens are not counted.
        mfu: the model FLOPs utilization, from 0 to 1; None where FLOPs or the device's peak are unknown.
        peak_memory_gib: the most memory that rank 0 has had so far: its tensors on a GPU, else its process.
        seconds_left: the time until the end of the last evaluation, at the pace of this attempt, which
            report/observers.py estimates. None in the attempt's first seconds, and before the event has left the ranks.
    """

    method = "on_step_logged"

    epoch: int
    step: int
    samples: int
    measures: dict[str, float]
    learning_rate: float
    samples_per_second: float
    gradient_norms: dict[str, float]
    gradient_norm: float = 0.0
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True)
class EpochFinished(Event):
    """The measures of an epoch's training and evaluation, by name.

    With several evaluations per epoch, there is one event for each evaluation and the training before it.

    Attributes:
        train: measures of the training samples.
        test: measures of the test samples; empty if there is a validation split.
        validation: measures of the validation samples; empty if there is no validation split.
        fraction: how much of the epoch had been trained.
        digest: the digest of the evaluated weights, 16 hex digits: equal bits have equal digests.
    """

    method = "on_epoch_finished"

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
        """Return the position in epochs: 1.25 after a quarter of the second epoch."""
        return self.epoch + self.fraction

    @property
    def split(self) -> str:
        """Return the name of the split that was evaluated."""
        return "validation" if self.validation else "test"

    @property
    def evaluated(self) -> dict[str, float]:
        """Return the measures of the split that was evaluated."""
        return self.validation or self.test


def list_digests(epochs: Iterable[EpochFinished]) -> list[tuple[float, str]]:
    """Return the position in epochs and the digest of each evaluation."""
    return [(epoch.position, epoch.digest) for epoch in epochs]


@dataclass(frozen=True)
class EpochChosen(Event):
    """The only evaluation on the test split, with the weights of the best epoch on the validation split.

    Attributes:
        epoch: the best epoch, from 0.
        epochs: how many epochs were trained.
        measures: those of the test split; empty where a loop of a user's own does not test.
        stopped_early: whether training ended before settings.epochs because patience ran out.
        is_best: False if there was no choice and the epoch is the last one.
        fraction: how much of the best epoch had been trained.
    """

    method = "on_epoch_chosen"

    epoch: int
    epochs: float
    measures: dict[str, float]
    stopped_early: bool
    seconds: float
    is_best: bool = True
    fraction: float = 1.0

    @property
    def position(self) -> float:
        """Return the position of the best evaluation in epochs: 1.25 after a quarter of the second epoch."""
        return self.epoch + self.fraction


@dataclass(frozen=True)
class NotLearning(Event):
    """A warning that training does not learn as it should. Training continues.

    Attributes:
        reason: a sentence that ends with remedies.
    """

    method = "on_not_learning"

    epoch: int
    step: int
    reason: str


@dataclass(frozen=True)
class RanksTimed(Event):
    """Seconds of each rank since this attempt began, by what the rank did; the lists are in the order of the ranks.

    Attributes:
        data: waiting for the rank's data, which are read and augmented meanwhile.
        computing: computing.
        waiting: waiting for the other ranks, and exchanging gradients with them.
        waited_for: how much longer this rank took than a fast one, while the others waited for it.
    """

    method = "on_ranks_timed"

    data: list[float]
    computing: list[float]
    waiting: list[float]
    waited_for: list[float]


@dataclass(frozen=True)
class SlowRank(Event):
    """A warning that the other ranks keep waiting for one rank.

    Attributes:
        reason: a sentence that ends with what to look at.
        cause: "data" or "compute".
    """

    method = "on_slow_rank"

    epoch: int
    step: int
    reason: str
    rank: int
    host: str
    cause: str


@dataclass(frozen=True)
class OddNodes(Event):
    """Nodes whose own hardware is odd, by a comparison before the first step. Training goes on there."""

    method = "on_odd_nodes"

    nodes: tuple[str, ...]
    reason: str


Warned = NotLearning | SlowRank  # the events that a run's result lists as warnings


@dataclass(frozen=True)
class GradientsSeen(Event):
    """Histograms of each parameter's gradient in an epoch's last step: counts of n bins, and their n + 1 edges.

    There is no such event if the update of that step was left out.
    """

    method = "on_gradients_seen"

    epoch: int
    histograms: dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A complete checkpoint at path, of the state before this step.

    Attributes:
        stall_seconds: how long training stood still.
        write_seconds: how long the write itself took, in the background.
    """

    method = "on_checkpoint_written"

    epoch: int
    step: int
    path: str
    stall_seconds: float
    write_seconds: float


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint that could not be written. Training continues without it."""

    method = "on_checkpoint_failed"

    reason: str


@dataclass(frozen=True)
class CheckpointRefused(Event):
    """The reason why training started afresh although there was a checkpoint."""

    method = "on_checkpoint_refused"

    reason: str


@dataclass(frozen=True)
class RanksRestarted(Event):
    """The ranks of this pod have ended, and start again from the newest checkpoint.

    Attributes:
        reason: why the ranks ended.
        left: how often the ranks may still be restarted.
    """

    method = "on_ranks_restarted"

    reason: str
    left: int


@dataclass(frozen=True)
class Printed(Event):
    """A line that a rank's code, or a library, has printed."""

    method = "on_printed"

    rank: int
    text: str


def tell(observer: object, event: Any) -> None:
    """Call the observer's method for this kind of event, such as on_epoch_finished, if the observer has one."""
    method = getattr(observer, event.method, None)
    if method:
        method(event)


def forward_to_all(*listeners: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that passes each event to all listeners, in their order.

    If a listener raises an error, the function raises it, and the later listeners do not get the event.
    """

    def forward(event: Any) -> None:
        for listener in listeners:
            listener(event)

    return forward


class Observer:
    """The base of what listens to events: calling it calls its method for that event, if it has one."""

    def __call__(self, event: Any) -> None:
        tell(self, event)

    def close(self) -> None:
        """Release what the observer holds. No events follow."""
