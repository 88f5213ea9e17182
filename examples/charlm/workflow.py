"""A language model of characters.

pyflyte run charlm/workflow.py charlm_wf --settings '{"epochs": 2}'
"""

from flytekit import task, workflow

from charlm.settings import Settings
from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions

training = RecipeTraining("charlm.recipe:CharLM")


@task(**training.arguments())
def train_charlm(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)


@workflow
def charlm_wf(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return train_charlm(settings=settings, options=options)
