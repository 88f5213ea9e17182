"""What the ranks, nearly always rank 0, tell the parent: small, plain values; big things stay in files."""

from dataclasses import dataclass
from typing import Dict, List, Tuple, Union


@dataclass(frozen=True)
class RunStarted:
    """The ranks have met and the first step is next (first_epoch and first_step are above 0 after a resume).

    Attributes:
        samples: what the samples are called, in the plural: images.
        headline: the name of the measure that a run is judged by, after its loss.
        shares: names of the measures that are shares from 0 to 1, to be shown in per cent.
        layers: name, type and number of parameters of each module that has parameters of its own.
    """

    dataset: str
    samples: str
    headline: str
    shares: Tuple[str, ...]
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
    layers: List[Tuple[str, str, int]]


@dataclass(frozen=True)
class StepLogged:
    """State after a step: the measures, "loss" among them, are of all training samples since the last such event."""

    epoch: int
    step: int
    samples: int
    measures: Dict[str, float]
    learning_rate: float
    samples_per_second: float
    gradient_norms: Dict[str, float]  # Euclidean, per parameter, of this step


@dataclass(frozen=True)
class EpochFinished:
    """An epoch's training and evaluation: the measures of the training and of the test samples, by name."""

    epoch: int
    samples: int
    train: Dict[str, float]
    test: Dict[str, float]
    train_seconds: float
    evaluate_seconds: float


@dataclass(frozen=True)
class EpochLosses:
    """An epoch of an autoencoder: mean squared errors per pixel, over training and held-out images."""

    epoch: int
    train_loss: float
    validation_loss: float
    seconds: float


@dataclass(frozen=True)
class NotLearning:
    """By this step of this epoch training does not learn as it should; it goes on. The reason ends with remedies."""

    epoch: int
    step: int
    reason: str


@dataclass(frozen=True)
class GradientsSeen:
    """Distribution of each parameter's gradient in an epoch's last step: counts of n bins between n + 1 edges."""

    epoch: int
    histograms: Dict[str, Tuple[List[float], List[float]]]


@dataclass(frozen=True)
class CheckpointWritten:
    """A complete checkpoint of the state before this step of this epoch lies at path.

    Training stood still for stall_seconds of it; writing took write_seconds beside it.
    """

    epoch: int
    step: int
    path: str
    stall_seconds: float
    write_seconds: float


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; training goes on without it."""

    reason: str


@dataclass(frozen=True)
class CheckpointRefused:
    """There was a checkpoint, but training started afresh, for this reason."""

    reason: str


@dataclass(frozen=True)
class Printed:
    """A line that a rank's code, or a library's, has printed or warned."""

    rank: int
    text: str


Event = Union[
    RunStarted,
    StepLogged,
    EpochFinished,
    EpochLosses,
    NotLearning,
    GradientsSeen,
    CheckpointWritten,
    CheckpointFailed,
    CheckpointRefused,
    Printed,
]
