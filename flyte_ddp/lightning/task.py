"""A LightningModule as a Flyte task, in a workflow file of the user's own:

training = LightningTraining("my_project.model:LitModel", data="my_project.data:MyData", headline="accuracy")

@task(**training.arguments())
def train_model(settings: Settings, options: LightningOptions) -> RecipeOutputs:
    return training.run(settings, options)
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from flyte_ddp.data import prepared
from flyte_ddp.engine.job import Job, Subject, TrainingResult, subject_of
from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world, visible_gpus
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.settings import LightningOptions, LightningSettings
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.execution import flyte_retries
from flyte_ddp.tasks.pyflyte import set_up_pyflyte, ship
from flyte_ddp.tasks.recipe import Data, RecipeOutputs, outputs_of
from flyte_ddp.tasks.resources import check_gpus
from flyte_ddp.tasks.train import Trained, train_by, training_arguments
from flyte_ddp.tasks.webhook import telling_webhook
from flyte_ddp.user_code import find_code, joined

RANK = "flyte_ddp.lightning.rank"  # a name, because importing it would import torch


class LightningTraining:
    """A LightningModule and its data, known only by their names: their modules, which import torch, are for the ranks.

    Their first-party code and data files are shipped to the pods with the workflow's, and determine the cache version.
    """

    def __init__(
        self,
        module: str,
        data: str = "",
        headline: str = "loss",
        percent: Sequence[str] = (),
        data_files: Sequence[str] = (),
        observers: Sequence[str] = (),
    ):
        """module, data: "package.module:Name" of a LightningModule and a LightningDataModule; the latter may be left
        out if the former has its own data. headline: the main measure; percent: those from 0 to 1 that are shown in per
        cent. data_files: files that the module reads, relative to its module's file. observers: classes, named
        likewise, with a method for each event that concerns them; no part of the cache version.

        Create it at the top level of the workflow file, after the imports. Raises InputError if there is no such class.
        """
        set_up_pyflyte()
        codes = [find_code(module, data_files, ranks=(RANK,))]
        if data:
            codes.append(find_code(data, ranks=(RANK,)))
        self.code, self.roots = joined(codes), list(dict.fromkeys(code.root for code in codes))
        self.version = CodeVersion(self.code.version, ("torch", "lightning"))
        self.data, self.headline, self.percent = data, headline, tuple(percent)
        self.observers = [find_code(one) for one in observers]
        for code in (self.code, *self.observers):
            ship(code.files)

    def arguments(self, ignored_inputs: Sequence[str] = ("options",)) -> dict[str, Any]:
        """Arguments of the @task that trains: cache, retries, live report, resources."""
        return training_arguments(self.version, f"{self.code.name} ", ignored_inputs)

    def run(self, settings: LightningSettings, options: LightningOptions, data: Data = None) -> RecipeOutputs:
        """Trains with one process per rank, on the file or folder data, if the module or its data use one.

        Raises what launcher.launch raises.
        """
        return outputs_of(self.train(settings, options, data))

    @telling_webhook()
    @flyte_retries()
    def train(self, settings: LightningSettings, options: LightningOptions, data: Data = None) -> Trained:
        """The same, for a task with outputs of its own."""
        check_lightning(settings, options)
        check_gpus(visible_gpus())
        world = choose_world(settings.backend, options.nproc, sys.maxsize)  # the module's own batch size is of one rank
        launcher.warm_up([*launcher.PRELOAD, "lightning.pytorch"])  # takes seconds, while the data are downloaded

        def fetch() -> Subject:
            return self.subject(settings, None if data is None else Path(data.download()))

        def start(run: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
            job = LightningJob(run, self.data, options.strategy, self.headline, self.percent)
            return launcher.launch(f"{RANK}:run", world, job, options.timeout_seconds, on_event, roots=self.roots)

        return train_by(start, world, fetch, options, self.observers)

    def subject(self, settings: LightningSettings, source: Path | None) -> Subject:
        """What is trained; ReportedError if this pod's code is not what was registered."""
        self.version.check_registered()
        is_prepared = source is not None and (source / prepared.DESCRIPTION).exists()
        description = prepared.read_description(source) if source and is_prepared else None
        # whatever is around the ranks needs but what both kinds of settings have
        return subject_of(self.code, cast(TrainingSettings, settings), source, description=description)


def check_lightning(settings: LightningSettings, options: LightningOptions) -> None:
    """Raises InputError for what this machine, or Lightning, cannot do."""
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
