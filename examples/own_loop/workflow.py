"""A training loop of one's own.

pyflyte run own_loop/workflow.py own_loop_wf --settings '{"epochs": 30}'
"""

from flytekit import task, workflow

from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions
from own_loop.settings import Settings

training = RecipeTraining("own_loop.loop:train")


@task(**training.arguments())
def train_own_loop(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options)


@workflow
def own_loop_wf(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return train_own_loop(settings=settings, options=options)
