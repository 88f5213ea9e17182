from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """The settings of a small network on handwritten digits."""

    width: int = setting(128, minimum=1, help="units of the hidden layer.")
    learning_rate: float = setting(0.01, above=0, help="AdamW's, the highest of the schedule.")
    batch_size: int = 64
    epochs: int = 10
