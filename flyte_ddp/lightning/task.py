"""A LightningModule as a Flyte task, in a workflow file of the user's own.

training = LightningTraining(
    "my_project.model:LitModel",
    data="my_project.model:MyData",
    callbacks="my_project.model:callbacks",
    headline="val_accuracy",
)

@task(**training.arguments())
def train_model(settings: Settings, options: LightningOptions) -> RecipeOutputs:
    return training.run(settings, options)
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from flyte_ddp.attempt.pod import check_code
from flyte_ddp.code.user_code import find_code, find_observers, join_codes
from flyte_ddp.data.description import StoredData
from flyte_ddp.data.prepared import prepared
from flyte_ddp.engine.job import Job, Subject, make_subject
from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.flyte1.recipe import NamedTraining, RecipeOutputs
from flyte_ddp.flyte1.train import Data
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import visible_gpus
from flyte_ddp.lightning.job import LightningJob, without_split
from flyte_ddp.lightning.settings import LightningOptions, LightningSettings
from flyte_ddp.settings import RunOptions, TrainingSettings


class LightningTraining(NamedTraining[RecipeOutputs]):
    """The training of a LightningModule and its data, which only ranks import, with the outputs of a recipe."""

    outputs = RecipeOutputs
    worker = "flyte_ddp.lightning.rank:run"
    preload = (*launcher.PRELOAD, "lightning.pytorch")
    distributions = ("torch", "lightning")

    def __init__(
        self,
        module: str,
        data: str = "",
        callbacks: str = "",
        headline: str = "loss",
        percent: Sequence[str] = (),
        data_files: Sequence[str] = (),
        observers: Sequence[str] = (),
    ):
        """Find the code of a module, its data and its callbacks.

        Create it at the top level of the workflow file, after the imports.

        Args:
            module: "package.module:Name" of a LightningModule.
            data: likewise of a LightningDataModule; empty if the module has its own data.
            callbacks: likewise of a function that returns a list of callbacks, as for a Trainer.
            headline: the main measure, as the module logs it or without the split in front.
            percent: measures from 0 to 1 that are shown in per cent, named likewise.
            data_files: files that the module reads, relative to its module's file.
            observers: classes, named as the module, with a method for each event that concerns them; no part of the
                cache version.

        Raises:
            InputError: a name stands for nothing.
        """
        ranks = (self.worker.partition(":")[0],)
        others = [find_code(name, ranks=ranks) for name in (data, callbacks) if name]
        super().__init__(join_codes([find_code(module, data_files, ranks), *others]), find_observers(observers))
        self.datamodule, self.callbacks = data, callbacks
        self.headline = without_split(headline)
        self.percent = tuple(without_split(name) for name in percent)

    def arguments(self, ignored_inputs: Sequence[str] = (), **own: Any) -> dict[str, Any]:
        """Return arguments of @task as a recipe's; the cache tells options apart, as nproc changes the result."""
        return super().arguments(ignored_inputs, **own)

    def run(self, settings: LightningSettings, options: LightningOptions, data: Data = None) -> RecipeOutputs:  # type: ignore[override]
        """Train with one process per rank on this machine, and return the task's outputs.

        Args:
            settings: the settings that determine the result.
            options: how to run the training.
            data: the file or folder whose path the module or its data get as data_path; None if they need none.

        Raises:
            InputError: the training cannot be done as asked.
            Exception: a rank has failed, or the training was stopped. On a cluster it is the platform's error for that.
        """
        # Whatever is around the ranks needs but what both kinds of settings have
        return super().run(cast(TrainingSettings, settings), options, data)

    def run_as_rank(self, settings: LightningSettings, options: LightningOptions, data: Data = None) -> RecipeOutputs:  # type: ignore[override]
        """Train as one rank of many nodes, in a task whose arguments come from multinode; outputs on rank 0 only.

        The arguments are those of run().
        """
        return super().run_as_rank(cast(TrainingSettings, settings), options, data)

    def check(self, settings: TrainingSettings, options: RunOptions) -> None:
        check_lightning(settings, options)

    def most_ranks(self, settings: TrainingSettings) -> tuple[int, int]:
        return sys.maxsize, 0  # the module's own batch size is of one rank

    def subject(
        self, settings: TrainingSettings, source: Path | StoredData | None, init: Path | None = None
    ) -> Subject:
        check_code(self.code.version)
        is_prepared = isinstance(source, Path) and (source / prepared.DESCRIPTION).exists()
        description = prepared.read_description(cast(Path, source)) if is_prepared else None
        return make_subject(self.code, settings, source, description=description)

    def job_of_ranks(self, job: Job) -> LightningJob:
        own = ("datamodule", "callbacks", "headline", "percent")
        return LightningJob(**vars(job), **{name: getattr(self, name) for name in own})


def check_lightning(settings: Any, options: Any) -> None:
    """Raise InputError if settings or options have the wrong class, lightning is missing, or float16 has no GPU."""
    for value, kind in ((settings, LightningSettings), (options, LightningOptions)):
        if not isinstance(value, kind):
            raise InputError(f"{type(value).__name__} must derive from flyte_ddp.{kind.__name__}")
    if find_spec("lightning") is None:
        raise InputError(f"a LightningModule needs {not_installed('lightning', 'lightning')}")
    if settings.precision == "float16" and not visible_gpus():
        raise InputError(
            "precision float16 needs a GPU (Lightning's 16-mixed does not run on a CPU) and none is visible here: "
            "use bfloat16 or float32"
        )
