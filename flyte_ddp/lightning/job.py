"""A training under Lightning, as its ranks need to know it. Standard library only."""

from dataclasses import dataclass
from typing import Any

from flyte_ddp.engine.job import Job
from flyte_ddp.lightning.settings import LightningOptions


@dataclass(frozen=True, kw_only=True)
class LightningJob(Job):
    """One training run; its recipe names the LightningModule.

    Attributes:
        settings: LightningSettings.
        datamodule: "package.module:Name" of the LightningDataModule; empty if the module has its own data.
        headline: name of the main measure.
        percent: names of the measures from 0 to 1 that are shown in per cent.
    """

    settings: Any
    options: LightningOptions
    datamodule: str
    headline: str
    percent: tuple[str, ...]
