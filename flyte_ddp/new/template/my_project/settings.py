"""The settings, which determine the result. They are read before any rank starts, so this module imports no torch."""

from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = setting(5e-3, above=0)
    width: int = setting(128, minimum=1)
    dropout: float = setting(0.2, minimum=0, below=1)
