"""The job that the parent sends to the training processes, and the result that they return."""

from dataclasses import dataclass

from flyte_ddp.events import EpochFinished
from mirrored.settings import Hyperparameters

CLASSES = ("malignant", "benign")


@dataclass(frozen=True)
class Job:
    """A training to run.

    Attributes:
        ports: ports of 127.0.0.1, one per worker; none with a single process.
        model_path: where the first process writes the trained network, a .keras file.
        checkpoint_path: where the first process keeps the checkpoint. Training resumes from one that is there.
    """

    hp: Hyperparameters
    ports: list[int]
    model_path: str
    checkpoint_path: str


@dataclass(frozen=True)
class Result:
    """The result, the same from every process.

    Attributes:
        devices: the devices of this process.
        replicas: number of replicas of the network, all processes together.
        confusion: test samples by class [actual][predicted].
    """

    epochs: list[EpochFinished]
    devices: list[str]
    replicas: int
    confusion: list[list[int]]
