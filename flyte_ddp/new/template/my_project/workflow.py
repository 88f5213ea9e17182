"""pyflyte run my_project/workflow.py my_project_wf --settings '{"epochs": 20}' --options '{"nproc": 1}'"""

from flytekit import task, workflow

from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions
from my_project.settings import Settings

training = RecipeTraining("my_project.recipe:Digits")


@task(**training.arguments())
def train_my_project(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)


@workflow
def my_project_wf(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return train_my_project(settings=settings, options=options)
