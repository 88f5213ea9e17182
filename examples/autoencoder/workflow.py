"""Lightning's autoencoder as a recipe, on a prepared dataset.

pyflyte run autoencoder/workflow.py autoencoder_wf --dataset digits --settings '{"epochs": 2}'
"""

from flytekit import task, workflow

from autoencoder.settings import Settings
from flyte_ddp import PreparedDataset, RecipeOutputs, RecipeTraining, RunOptions, prepare_dataset

training = RecipeTraining("autoencoder.recipe:AutoencoderRecipe")


@task(**training.arguments())
def train_autoencoder(data: PreparedDataset, settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options, data)


@workflow
def autoencoder_wf(
    dataset: str = "digits", settings: Settings = Settings(), options: RunOptions = RunOptions()
) -> RecipeOutputs:
    return train_autoencoder(data=prepare_dataset(name=dataset), settings=settings, options=options)
