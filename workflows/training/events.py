"""What rank 0 tells the parent while it trains: small, plain values; big things stay in files."""

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class RunStarted:
    """The ranks have met and the first step is next (first_epoch and first_step are above 0 after a resume)."""

    dataset: str
    train_samples: int
    test_samples: int
    world_size: int
    backend: str
    device: str
    precision: str
    epochs: int
    steps_per_epoch: int
    first_epoch: int
    first_step: int
    startup_seconds: float


@dataclass(frozen=True)
class StepLogged:
    """State after a step: loss and accuracy are means over all training samples seen since the last such event."""

    epoch: int
    step: int
    samples: int
    loss: float
    accuracy: float
    learning_rate: float
    samples_per_second: float


@dataclass(frozen=True)
class EpochFinished:
    """An epoch's training and evaluation; accuracies from 0 to 1, losses are means per sample."""

    epoch: int
    train_loss: float
    train_accuracy: float
    test_loss: float
    accuracy: float
    train_seconds: float
    evaluate_seconds: float


@dataclass(frozen=True)
class CheckpointWritten:
    """A complete checkpoint of the state before this step of this epoch lies at path."""

    epoch: int
    step: int
    path: str


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; training goes on without it."""

    reason: str


@dataclass(frozen=True)
class CheckpointRefused:
    """There was a checkpoint, but training started afresh, for this reason."""

    reason: str


Event = Union[RunStarted, StepLogged, EpochFinished, CheckpointWritten, CheckpointFailed, CheckpointRefused]
