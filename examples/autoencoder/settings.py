from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    epochs: int = 10
    learning_rate: float = setting(1e-3, above=0)
    evaluate_on: str = setting("test", choices=("test", "held_out"))  # held_out is to choose settings by
    precision: str = setting("float32", choices=("float32", "bfloat16"))
