"""A LightningModule as a Flyte task, in a workflow file of the user's own:

training = LightningTraining("my_project.model:LitModel", data="my_project.model:MyData", headline="accuracy")

@task(**training.arguments())
def train_model(settings: Settings, options: LightningOptions) -> RecipeOutputs:
    return training.run(settings, options)
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from flyte_ddp.attempt.training import Trained
from flyte_ddp.lightning.settings import LightningOptions, LightningSettings
from flyte_ddp.lightning.training import find_lightning_code, train, train_as_rank
from flyte_ddp.tasks import platform
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.data import downloaded, downloaded_once
from flyte_ddp.tasks.pyflyte import set_up_pyflyte, ship
from flyte_ddp.tasks.recipe import RecipeOutputs, recipe_outputs
from flyte_ddp.tasks.train import Data, training_arguments
from flyte_ddp.user_code import find_code


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
        self.lit = find_lightning_code(module, data, headline, percent, data_files)
        self.version = CodeVersion(self.lit.code.version, ("torch", "lightning"))
        self.observers = [find_code(one) for one in observers]
        for code in (self.lit.code, *self.observers):
            ship(code.files)

    def arguments(self, ignored_inputs: Sequence[str] = ("options",)) -> dict[str, Any]:
        """Arguments of the @task that trains: cache, retries, live report, resources."""
        return training_arguments(self.version, f"{self.lit.code.name} ", ignored_inputs)

    def run(self, settings: LightningSettings, options: LightningOptions, data: Data = None) -> RecipeOutputs:
        """Trains with one process per rank, on the file or folder data, if the module or its data use one.

        Raises what launcher.launch raises.
        """
        return recipe_outputs(self.train(settings, options, data))

    def train(self, settings: LightningSettings, options: LightningOptions, data: Data = None) -> Trained:
        """The same, for a task with outputs of its own."""
        return train(platform, self.lit, settings, options, lambda: downloaded(data), self.observers)

    def run_as_rank(self, settings: LightningSettings, options: LightningOptions, data: Data = None) -> RecipeOutputs:
        """Trains as one rank of many nodes, in a task whose arguments come from multinode; outputs on rank 0 only."""
        from flyte_ddp.tasks.multinode import picklable  # it imports torch

        fetch = partial(downloaded_once, data)
        trained = train_as_rank(platform, self.lit, settings, options, fetch, self.observers)
        outputs: RecipeOutputs = picklable(recipe_outputs(trained) if trained else None)
        return outputs
