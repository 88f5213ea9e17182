"""Training on blocks in Flyte's storage, which an earlier task has written there.

pyflyte run stream/workflow.py stream_wf --thousands 40
"""

from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory

from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions, new_folder, stream, write_blocks
from flyte_ddp.flyte1.resources import small_resources
from stream.settings import Settings
from stream.waves import waves

training = RecipeTraining("stream.recipe:Stream")


@task(**small_resources())
def write_waves(thousands: int) -> FlyteDirectory:
    folder = new_folder()
    write_blocks(f"{folder.path}/train", waves(thousands, seed=0), rows=250)
    write_blocks(f"{folder.path}/test", waves(1, seed=1), rows=250)
    return folder


@task(**training.arguments())
def train_stream(folder: FlyteDirectory, settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options, stream(folder))


@workflow
def stream_wf(
    thousands: int = 20, settings: Settings = Settings(), options: RunOptions = RunOptions()
) -> RecipeOutputs:
    return train_stream(folder=write_waves(thousands=thousands), settings=settings, options=options)
