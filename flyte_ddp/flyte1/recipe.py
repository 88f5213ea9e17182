"""A user's recipe as a Flyte task, in a workflow file of their own.

training = RecipeTraining("my_project.model:CharLM")

@task(**training.arguments())
def train_model(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.platform_training import CommonRecipeTraining
from flyte_ddp.attempt.prediction import write_predictions
from flyte_ddp.attempt.summaries import RecipeSummary
from flyte_ddp.attempt.trained import Trained
from flyte_ddp.code.user_code import UserCode
from flyte_ddp.data.description import StoredData
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.caching import CodeVersion
from flyte_ddp.flyte1.data import downloaded, find_data
from flyte_ddp.flyte1.outputs import output_file
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte, ship
from flyte_ddp.flyte1.train import Data, FlytekitTraining, make_common_outputs, training_arguments
from flyte_ddp.settings import TrainingSettings

Outputs = TypeVar("Outputs")


class RecipeOutputs(NamedTuple):
    """The outputs of a recipe's training.

    Attributes:
        epoch_measures: measures by name after each evaluation: of the validation samples, if any, else of the test
            samples.
        model_state: the trained weights, a CPU state_dict, from which the recipe's load_model rebuilds the network.
            With a validation split they are those of the best epoch, and logs has those of the last one as last.pt.
        summary: the figures.
        report: an HTML page in one file.
        logs: a folder with the recipe's predictions on the test samples, and what ranks, trackers and profiler wrote.
    """

    epoch_measures: list[dict[str, float]]
    model_state: PythonPickledFile
    summary: RecipeSummary
    report: FlyteFile["html"]  # noqa: F821
    logs: FlyteDirectory


def recipe_outputs(trained: Trained) -> RecipeOutputs:
    return RecipeOutputs(trained.epoch_measures, *make_common_outputs(trained, trained.recipe_summary()))


class NamedTraining(FlytekitTraining[Outputs]):
    """A training of a user's code, known only by its name: its module, which imports torch, is for the ranks.

    The code's first-party modules and data files are shipped to the pods with the workflow's, and determine the cache
    version.
    """

    distributions: Sequence[str] = ("torch",)

    def __init__(self, code: UserCode, observers: Sequence[UserCode]):
        set_up_pyflyte()
        super().__init__(code, observers)
        self.version = CodeVersion(code.version, self.distributions)
        for one in (self.code, *self.observers):
            ship(one.files)

    def arguments(self, ignored_inputs: Sequence[str] = ("options",), **own: Any) -> dict[str, Any]:
        """Return the keyword arguments of the @task that trains or predicts: cache, retries, live report, resources.

        The values come from the registered settings. The cache also depends on the recipe's code.

        Args:
            ignored_inputs: names of the task's inputs that the cache ignores.
            own: your own arguments of @task. Give them here, because Python refuses a keyword twice:
                @task(**arguments(requests=Resources(gpu="4"))). A quantity that you leave out of requests= and limits=
                is the registered one. environment=, secret_requests=, labels= and annotations= are added to the
                registered ones. All others, such as retries=, replace them. most_gpus=1 is not of @task: it limits a
                task that predicts to one GPU.
        """
        return training_arguments(self.version, f"{self.code.name} ", ignored_inputs, **own)


class RecipeTraining(CommonRecipeTraining[Data, RecipeOutputs], NamedTraining[RecipeOutputs]):
    """A training of a recipe, known only by its name: its module, which imports torch, is for the ranks."""

    @platform_errors(platform)
    def predict(
        self,
        model_state: FlyteFile,
        settings: TrainingSettings,
        shard: int = 0,
        shards: int = 1,
        data: Data | StoredData = None,
        split: str = "test",
        init: FlyteDirectory | None = None,
    ) -> FlyteFile:
        """Return an .npy file with a trained network's predictions (n, ...) for one shard of a split.

        The network computes in float32; the file has the dtype of recipe.predictions(). The file has a row for each
        sample of the shard, in the split's order. The files of all shards, concatenated by number, have the whole
        split.

        To compute shards in parallel, map a task over `shard`. Declare the task with arguments(ignored_inputs=(),
        most_gpus=1).

        Args:
            model_state: the weights.
            settings: the settings of the training.
            shard: the number of the shard, from 0.
            shards: the number of shards, into which the split is divided as evenly as possible.
            data: the data of the training.
            split: "train", "validation" or "test".
            init: the init of the training.

        Raises:
            InputError: there is no such shard, or the recipe has no predictions.
        """
        subject = self.subject(settings, find_data(data), downloaded(init))
        return output_file(write_predictions(platform, subject, Path(model_state.download()), shard, shards, split))

    def make_outputs(self, trained: Trained) -> RecipeOutputs:
        return recipe_outputs(trained)
