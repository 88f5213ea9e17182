"""A script as a task of Flyte 2, for the pods of a test."""

from flyte_ddp import RunOptions
from flyte_ddp.script.flyte2 import ScriptOutputs, ScriptTraining

training = ScriptTraining("tests/script/waits.py", arguments=["$DDP_CHECKPOINT_DIR"])
env = training.environment("script")


@env.task(**training.arguments())
async def train(options: RunOptions) -> ScriptOutputs:
    return training.run(options)
