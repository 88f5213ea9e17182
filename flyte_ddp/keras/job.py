"""A Keras training under tf.distribute: its input, the message to its processes, and the result."""

from dataclasses import dataclass
from typing import List, Tuple

from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochFinished
from flyte_ddp.settings import Settings, setting

CLASSES = ("malignant", "benign")


@dataclass(frozen=True)
class MirroredHyperparameters(Settings):
    """What to train, and on which devices.

    Attributes:
        strategy: mirrored is one process with a replica per device; multi_worker is one process per worker.
        devices: for strategy mirrored, such as GPU:0,GPU:1; empty is all GPUs or, without GPUs, all CPU devices.
        logical_devices: how many devices the CPU is divided into.
        workers: for strategy multi_worker, on this host; each has its share of the GPUs, or a CPU.
        epochs: passes over the training samples.
        batch_size: samples of one step, all replicas together.
        learning_rate: of Adam.
        dropout: share of each hidden layer's outputs that are set to zero in training.
        first_hidden, second_hidden: units of the hidden layers.
        seed: of the initial weights, the shuffling and the dropout.
    """

    strategy: str = setting("mirrored", choices=("mirrored", "multi_worker"))
    devices: str = setting("")
    logical_devices: int = setting(2, minimum=1, maximum=64)
    workers: int = setting(2, minimum=2, maximum=64)
    epochs: int = setting(30, minimum=1)
    batch_size: int = setting(32, minimum=1)
    learning_rate: float = setting(0.003, above=0)
    dropout: float = setting(0.2, minimum=0, below=1)
    first_hidden: int = setting(64, minimum=1, maximum=4096)
    second_hidden: int = setting(32, minimum=1, maximum=4096)
    seed: int = setting(1, minimum=0, maximum=2**32 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy == "multi_worker" and self.devices:
            raise InputError(
                f'devices must be empty with strategy "multi_worker", got "{self.devices}": each worker takes its share'
            )
        if len(set(self.device_names)) < len(self.device_names):
            raise InputError(f'devices must be named once each, got "{self.devices}"')

    @property
    def device_names(self) -> List[str]:
        return [name.strip().upper() for name in self.devices.split(",")] if self.devices else []

    @property
    def processes(self) -> int:
        return self.workers if self.strategy == "multi_worker" else 1


@dataclass(frozen=True)
class MirroredJob:
    """One training run, as its processes need to know it.

    Attributes:
        model_path: where rank 0 writes the trained network, a .keras file.
        checkpoint_path: where rank 0 keeps the checkpoint; training resumes from an earlier one there; empty is none.
        key: identifies all that determines the result; a checkpoint with another key is ignored.
        ports: of 127.0.0.1, one per worker; none with a single process.
    """

    hp: MirroredHyperparameters
    model_path: str
    checkpoint_path: str
    key: str
    ports: List[int]


@dataclass(frozen=True)
class MirroredResult:
    """The result, the same from every process.

    Attributes:
        devices: of this process.
        replicas: number of replicas of the network, all processes together.
        confusion: test samples by class [actual][predicted].
        layers: name, type and number of parameters of each.
    """

    epochs: List[EpochFinished]
    devices: List[str]
    replicas: int
    train_samples: int
    test_samples: int
    confusion: List[List[int]]
    layers: List[Tuple[str, str, int]]
