"""ResNet-18 on a folder of images with one sub-folder for each class.

pyflyte run resnet/workflow.py resnet_wf --folder path/to/images --settings '{"epochs": 2}'
"""

from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory

from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions, folder_by_content
from resnet.settings import Settings

training = RecipeTraining("resnet.recipe:ResNet")


@task(**training.arguments())
def train_resnet(folder: FlyteDirectory, settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options, folder)


@workflow
def resnet_wf(
    folder: FlyteDirectory, settings: Settings = Settings(), options: RunOptions = RunOptions()
) -> RecipeOutputs:
    return train_resnet(folder=folder_by_content(folder=folder), settings=settings, options=options)
