from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = 32
    epochs: int = 60
    learning_rate: float = setting(1e-3, above=0)
    weight_decay: float = setting(1e-2, minimum=0)
    dropout: float = setting(0.2, minimum=0, below=1)
    width: int = setting(32, minimum=1)
