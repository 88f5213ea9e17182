from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = 32
    test_batch_size: int = 200
    epochs: int = 4
    learning_rate: float = setting(3e-3, above=0)
    dropout: float = setting(0.1, minimum=0, below=1)
    width: int = setting(8, minimum=1)
    images: int = setting(2000, minimum=5)
