"""A training under Lightning, as its ranks need to know it. Standard library only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.engine.job import Job


@dataclass(frozen=True)
class LightningJob:
    """One training run; its result is an engine.job.TrainingResult.

    Attributes:
        run: its recipe names the LightningModule, its settings are LightningSettings.
        datamodule: "package.module:Name" of the LightningDataModule; empty if the module has its own data.
        strategy: Lightning's.
        headline: name of the main measure.
        percent: names of the measures from 0 to 1 that are shown in per cent.
    """

    run: Job
    datamodule: str
    strategy: str
    headline: str
    percent: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.run.recipe

    @property
    def settings(self) -> Any:
        return self.run.settings

    @property
    def logs(self) -> Path:
        """The Trainer's default_root_dir."""
        return Path(self.run.logs)
