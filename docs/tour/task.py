"""Step 8: the same training as a Flyte task."""

from flytekit import task

from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions
from settings import Settings

training = RecipeTraining("recipe:Digits")


@task(**training.arguments())
def train_digits(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)
