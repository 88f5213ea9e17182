"""Regression on a table.

pyflyte run tabular/workflow.py tabular_wf --settings '{"epochs": 30}'
"""

from flytekit import task, workflow

from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions
from tabular.settings import Settings

training = RecipeTraining("tabular.recipe:Tabular")


@task(**training.arguments())
def train_tabular(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)


@workflow
def tabular_wf(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return train_tabular(settings=settings, options=options)
