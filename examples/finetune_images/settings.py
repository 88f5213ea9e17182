from dataclasses import dataclass

from flyte_ddp import TrainingSettings, setting


@dataclass(frozen=True)
class Settings(TrainingSettings):
    network: str = setting("convnext_atto")  # of timm.list_models()
    batch_size: int = 64
    test_batch_size: int = 256
    epochs: int = 5
    learning_rate: float = setting(1e-4, above=0)
    side: int = setting(64, minimum=32)  # pixels, the size that images are scaled to
