"""What breaks in the training of faulty.py. No torch."""

from dataclasses import dataclass

from flyte_ddp.fields import setting
from flyte_ddp.settings import TrainingSettings

FAULTS = ("none", "nan", "sleep", "sleep in the data", "stop", "kill", "sleeping kernel", "out of memory")
SOURCES = ("tensors", "memory map", "dataset")
SAMPLES = 512


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """ranks: those that break, separated by commas; step: of the first epoch, from 1; source: of the samples."""

    batch_size: int = 32
    epochs: int = 4
    learning_rate: float = setting(0.02)
    precision: str = setting("float32")
    log_interval: int = setting(1, minimum=1)
    fault: str = setting("none", choices=FAULTS)
    ranks: str = setting("0")
    step: int = setting(5, minimum=1)
    source: str = setting("tensors", choices=SOURCES)
