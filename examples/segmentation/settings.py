from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = setting(32, minimum=1)
    test_batch_size: int = setting(200, minimum=1)
    epochs: int = setting(4, minimum=1)
    learning_rate: float = setting(3e-3, above=0)
    dropout: float = setting(0.1, minimum=0, below=1)
    width: int = setting(8, minimum=1)
    images: int = setting(2000, minimum=5)
