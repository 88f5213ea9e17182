"""A training under Lightning, as its ranks need to know it. Standard library only."""

import re
from dataclasses import dataclass
from typing import Any

from flyte_ddp.engine.job import Job
from flyte_ddp.lightning.settings import LightningOptions

SPLIT = re.compile(r"^(train(ing)?|val(id|idation)?|test)[_/]")


@dataclass(frozen=True, kw_only=True)
class LightningJob(Job):
    """A training under Lightning, whose recipe is the name of the LightningModule.

    Attributes:
        settings: LightningSettings.
        datamodule: "package.module:Name" of the LightningDataModule; empty if the module has its own data.
        callbacks: "package.module:name" of the function that returns the Trainer's callbacks; empty if there is none.
        headline: name of the main measure.
        percent: names of the measures from 0 to 1 that are shown in per cent.
    """

    settings: Any
    options: LightningOptions
    datamodule: str
    callbacks: str
    headline: str
    percent: tuple[str, ...]


def without_split(name: str) -> str:
    """Return the name of a measure without the split in front: val_loss and val/loss are both loss."""
    return SPLIT.sub("", name)
