"""How one rank of slowed.py is slowed down. No torch."""

import os
from dataclasses import dataclass

from flyte_ddp.fields import setting
from flyte_ddp.settings import TrainingSettings

SLOWED = "benchmarks.slowed:Slowed"
WAYS = ("none", "data", "forward pass")
SAMPLES, FEATURES = 8192, 512


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """rank: the slowed one; milliseconds: by which each of its steps takes longer; width: of the network."""

    batch_size: int = 512
    epochs: int = 24
    learning_rate: float = setting(0.02)
    precision: str = setting("float32")
    way: str = setting("none", choices=WAYS)
    rank: int = setting(1)
    milliseconds: float = setting(10.0)
    width: int = setting(1024, minimum=1)


def core_of(rank: int) -> int:
    """That a rank of this host has to itself."""
    return sorted(os.sched_getaffinity(0))[rank]
