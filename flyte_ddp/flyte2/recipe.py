"""A user's recipe as a task of Flyte 2, in a file of their own.

training = RecipeTraining("my_project.model:CharLM")
env = training.environment("my_project")

@env.task(**training.arguments())
async def train_model(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return training.run(settings, options)
"""

from dataclasses import dataclass

from flyte.io import Dir, File

from flyte_ddp.attempt.platform_training import CommonRecipeTraining
from flyte_ddp.attempt.summaries import RecipeSummary
from flyte_ddp.flyte2.train import Data, Flyte2Training


@dataclass(frozen=True)
class RecipeOutputs:
    """The outputs of a recipe's training, with the fields of flyte_ddp.flyte1.recipe.RecipeOutputs."""

    epoch_measures: list[dict[str, float]]
    model_state: File
    summary: RecipeSummary
    report: File
    logs: Dir


class RecipeTraining(CommonRecipeTraining[Data, RecipeOutputs], Flyte2Training[RecipeOutputs]):
    """A training of a recipe, known only by its name: its module, which imports torch, is for the ranks.

    The recipe's first-party code and data files are shipped to the pods with the workflow's, and determine the cache
    version.
    """

    outputs = RecipeOutputs
