from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = 64
    test_batch_size: int = 256
    epochs: int = 10
    learning_rate: float = setting(1e-3, above=0)
    weight_decay: float = setting(1e-2, minimum=0)
    side: int = setting(64, minimum=32)  # pixels, the size that images are scaled to
