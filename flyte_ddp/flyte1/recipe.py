"""A user's recipe as a Flyte task, in a workflow file of their own.

training = RecipeTraining("my_project.model:CharLM")

@task(**training.arguments())
def train_model(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.platform_training import CommonRecipeTraining
from flyte_ddp.attempt.summaries import RecipeSummary
from flyte_ddp.code.user_code import UserCode
from flyte_ddp.flyte1.caching import CodeVersion
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte, ship
from flyte_ddp.flyte1.train import Data, FlytekitTraining, training_arguments

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
                @task(**arguments(requests=Resources(gpu="4"))). requests= and limits= replace single registered
                quantities. environment=, secret_requests=, labels= and annotations= are added to the registered ones.
                All others, such as retries=, replace them. most_gpus=1, which is not of @task, limits a task that
                predicts to one GPU.

        Raises:
            InputError: as training_arguments() does.
        """
        return training_arguments(self.version, f"{self.code.name} ", ignored_inputs, **own)


class RecipeTraining(CommonRecipeTraining[Data, RecipeOutputs], NamedTraining[RecipeOutputs]):
    """A training of a recipe, known only by its name: its module, which imports torch, is for the ranks."""

    outputs = RecipeOutputs
