"""Steps 6 to 8: what determines the result."""

from dataclasses import dataclass

from flyte_ddp import TrainingSettings


@dataclass(frozen=True)
class Settings(TrainingSettings):
    epochs: int = 10
    batch_size: int = 100  # of all ranks together
    learning_rate: float = 0.5
    precision: str = "float32"
    threads: int = 1  # of each rank, on any number of nodes: others may round otherwise
    log_interval: int = 100
