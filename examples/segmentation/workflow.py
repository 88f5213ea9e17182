"""A network that finds the pixels of a noisy image that are strokes.

pyflyte run segmentation/workflow.py segmentation_wf --settings '{"epochs": 4}'
"""

from flytekit import task, workflow

from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions
from segmentation.settings import Settings

training = RecipeTraining("segmentation.recipe:Segmentation")


@task(**training.arguments())
def train_segmentation(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)


@workflow
def segmentation_wf(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return train_segmentation(settings=settings, options=options)
