"""MNIST, trained by one process per GPU (or CPU rank) with DistributedDataParallel, under Flyte 2.

flyte run --local flyte2/mnist.py main --hp '{"epochs": 1}'
"""

from flyte.io import Dir, File

from flyte_ddp.flyte2.data import by_content
from flyte_ddp.flyte2.environment import preparation_environment, workflow_environment
from flyte_ddp.flyte2.prepare import preparation_arguments, prepare_dataset, resolve_dataset
from flyte_ddp.flyte2.train import TrainingOutputs, image_training
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions

preparation = preparation_environment("mnist_preparation")
training = image_training.environment("mnist_training")
workflow = workflow_environment("mnist", preparation, training)


@preparation.task(**preparation_arguments())
async def prepare(name: str) -> Dir:
    """Download and prepare the named dataset."""
    return prepare_dataset(name)


@training.task(**image_training.arguments())
async def train(hp: Hyperparameters, data: Dir, options: RunOptions, init: File | None = None) -> TrainingOutputs:
    """Train hp.model on the prepared dataset, with options.nproc ranks."""
    return image_training.run(hp, options, data, init)


@workflow.task
async def main(
    hp: Hyperparameters = Hyperparameters(), options: RunOptions = RunOptions(), init: File | None = None
) -> TrainingOutputs:
    """Prepare the dataset that hp names, and train on it.

    Args:
        hp: the settings that determine the result; omitted fields keep their defaults.
        options: how to run the training; the cache ignores them.
        init: the model_state of an earlier training to start from, or its final-checkpoint to continue from.
    """
    start = by_content(init)
    data = await prepare(resolve_dataset(hp, options))
    return await train(hp, data, options, start)
