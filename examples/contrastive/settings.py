from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = setting(128, minimum=2)
    test_batch_size: int = setting(128, minimum=2)  # the nearest neighbour is searched among these
    epochs: int = setting(40, minimum=1)
    learning_rate: float = setting(2e-3, above=0)
    temperature: float = setting(0.2, above=0)
