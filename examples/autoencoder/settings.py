from dataclasses import dataclass

from flyte_ddp import LightningSettings, setting


@dataclass(frozen=True)
class Settings(LightningSettings):
    epochs: int = 10
    batch_size: int = setting(64, minimum=1)  # of each rank
    learning_rate: float = setting(1e-3, above=0)
