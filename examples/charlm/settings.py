from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = 64
    test_batch_size: int = 256
    epochs: int = 4
    learning_rate: float = setting(3e-3, above=0)
    weight_decay: float = setting(0.1, minimum=0)
    dropout: float = setting(0.1, minimum=0, below=1)
    width: int = setting(64, minimum=4)  # a multiple of 4, the number of heads
    layers: int = setting(2, minimum=1)
    characters: int = setting(200_000, minimum=1000)  # of the text
