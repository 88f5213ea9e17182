from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """Of the training of a small network on handwritten digits.

    Attributes:
        width: units of the hidden layer.
        learning_rate: the highest of the schedule, of AdamW.
    """

    width: int = setting(128, minimum=1)
    learning_rate: float = setting(0.01, above=0)
    batch_size: int = 64
    epochs: int = 10
