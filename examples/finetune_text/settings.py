from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = 32
    epochs: int = 5
    learning_rate: float = setting(1e-3, above=0)
    lora_rank: int = setting(8, minimum=0)  # of the adapters; 0 trains all weights
