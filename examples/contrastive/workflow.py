"""Embeddings of images without labels.

pyflyte run contrastive/workflow.py contrastive_wf --settings '{"epochs": 10}'
"""

from flytekit import task, workflow

from contrastive.settings import Settings
from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions

training = RecipeTraining("contrastive.recipe:Contrastive")


@task(**training.arguments())
def train_contrastive(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)


@workflow
def contrastive_wf(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return train_contrastive(settings=settings, options=options)
