"""The settings of a training."""

from dataclasses import dataclass

from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, setting


@dataclass(frozen=True)
class Hyperparameters(Settings):
    """What to train, and on which devices."""

    strategy: str = setting(
        "mirrored",
        choices=("mirrored", "multi_worker"),
        help="mirrored is one process with a replica per device; multi_worker is one process per worker.",
    )
    devices: str = setting(
        "", help="for strategy mirrored, such as GPU:0,GPU:1; empty is all GPUs or, without GPUs, all CPU devices."
    )
    logical_devices: int = setting(2, minimum=1, maximum=64, help="how many devices the CPU is divided into.")
    workers: int = setting(
        2,
        minimum=2,
        maximum=64,
        help="for strategy multi_worker, on this host; each has its part of the GPUs, or a CPU.",
    )
    epochs: int = setting(30, minimum=1, help="passes over the training samples.")
    batch_size: int = setting(32, minimum=1, help="samples of one step, all replicas together.")
    learning_rate: float = setting(0.003, above=0, help="of Adam.")
    dropout: float = setting(
        0.2, minimum=0, below=1, help="fraction of each hidden layer's outputs that are set to zero in training."
    )
    seed: int = setting(
        1, minimum=0, maximum=2**32 - 1, help="of the initial weights, the order of the samples and the dropout."
    )

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
