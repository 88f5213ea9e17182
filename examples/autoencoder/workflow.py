"""Lightning's autoencoder on a prepared dataset, under Lightning's Trainer.

pyflyte run autoencoder/workflow.py autoencoder_wf --dataset digits --settings '{"epochs": 2}'
"""

from flytekit import task, workflow

from autoencoder.settings import Settings
from flyte_ddp import LightningOptions, LightningTraining, PreparedDataset, RecipeOutputs, prepare_dataset

training = LightningTraining("autoencoder.module:LitAutoencoder", "autoencoder.module:PreparedImages")


@task(**training.arguments())
def train_autoencoder(data: PreparedDataset, settings: Settings, options: LightningOptions) -> RecipeOutputs:
    return training.run(settings, options, data)


@workflow
def autoencoder_wf(
    dataset: str = "digits", settings: Settings = Settings(), options: LightningOptions = LightningOptions()
) -> RecipeOutputs:
    return train_autoencoder(data=prepare_dataset(name=dataset), settings=settings, options=options)
