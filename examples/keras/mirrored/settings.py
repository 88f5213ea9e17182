"""What can be chosen."""

from dataclasses import dataclass

from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, setting


@dataclass(frozen=True)
class Hyperparameters(Settings):
    """What to train, and on which devices.

    Attributes:
        strategy: mirrored is one process with a replica per device; multi_worker is one process per worker.
        devices: for strategy mirrored, such as GPU:0,GPU:1; empty is all GPUs or, without GPUs, all CPU devices.
        logical_devices: how many devices the CPU is divided into.
        workers: for strategy multi_worker, on this host; each has its part of the GPUs, or a CPU.
        epochs: passes over the training samples.
        batch_size: samples of one step, all replicas together.
        learning_rate: of Adam.
        dropout: fraction of each hidden layer's outputs that are set to zero in training.
        seed: of the initial weights, the order of the samples and the dropout.
    """

    strategy: str = setting("mirrored", choices=("mirrored", "multi_worker"))
    devices: str = setting("")
    logical_devices: int = setting(2, minimum=1, maximum=64)
    workers: int = setting(2, minimum=2, maximum=64)
    epochs: int = setting(30, minimum=1)
    batch_size: int = setting(32, minimum=1)
    learning_rate: float = setting(0.003, above=0)
    dropout: float = setting(0.2, minimum=0, below=1)
    seed: int = setting(1, minimum=0, maximum=2**32 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy == "multi_worker" and self.devices:
            raise InputError(
                f'devices must be empty with strategy "multi_worker", got "{self.devices}": each worker takes its part'
            )

    @property
    def device_names(self) -> list[str]:
        return [name.strip().upper() for name in self.devices.split(",")] if self.devices else []

    @property
    def processes(self) -> int:
        return self.workers if self.strategy == "multi_worker" else 1
