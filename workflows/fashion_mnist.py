"""Fashion-MNIST, trained by one spawned process per GPU (or CPU rank) with DistributedDataParallel.

pyflyte run workflows/fashion_mnist.py fashion_mnist_wf
"""

from flytekit import task, workflow
from flytekit.types.file import FlyteFile

from flyte_ddp.flyte1.data import init_by_content
from flyte_ddp.flyte1.prepare import PreparedDataset, prepare_dataset, resolve_dataset
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.train import TrainingOutputs, image_training, training_arguments
from flyte_ddp.recipes.hyperparameters import FashionMNISTHyperparameters
from flyte_ddp.settings import RunOptions

set_up_pyflyte()


@task(**training_arguments())
def fashion_mnist_task(
    hp: FashionMNISTHyperparameters, data: PreparedDataset, options: RunOptions, init: FlyteFile | None = None
) -> TrainingOutputs:
    """Train hp.model on the prepared dataset, with options.nproc ranks."""
    return image_training.run(hp, options, data, init)


@workflow
def fashion_mnist_wf(
    hp: FashionMNISTHyperparameters = FashionMNISTHyperparameters(),
    options: RunOptions = RunOptions(),
    init: FlyteFile | None = None,
) -> TrainingOutputs:
    """Prepare the dataset that hp names, and train on it.

    Args:
        hp: the settings that determine the result; omitted fields keep their defaults.
        options: how to run the training; the cache ignores them.
        init: the model_state of an earlier training to start from, or its final-checkpoint to continue from.
    """
    name = resolve_dataset(hp=hp, options=options, auto="fashion_mnist")
    return fashion_mnist_task(hp=hp, data=prepare_dataset(name=name), options=options, init=init_by_content(init=init))


if __name__ == "__main__":
    print(fashion_mnist_wf())
