"""flyte run --local my_project/workflow.py train_my_project --settings '{"epochs": 20}' --options '{"nproc": 1}'"""

from flyte_ddp import RunOptions
from flyte_ddp.flyte2.recipe import RecipeOutputs, RecipeTraining
from my_project.settings import Settings

training = RecipeTraining("my_project.recipe:Digits")
env = training.environment("my_project")


@env.task(**training.arguments())
async def train_my_project(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return training.run(settings, options)
