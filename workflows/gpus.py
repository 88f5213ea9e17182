"""The same training with the number of GPUs as an input of each run instead of a setting of the registration."""

from flytekit import dynamic, workflow

from workflows.mnist import pytorch_mnist_task
from workflows.tasks.inputs import explain_unreadable_settings
from workflows.tasks.prepare import prepare_dataset, resolve_dataset
from workflows.tasks.resources import registered_environment, small_resources, training_sizes
from workflows.tasks.train import TrainingOutputs
from workflows.training.hyperparameters import Hyperparameters, RunOptions

explain_unreadable_settings()


# What a @dynamic starts is compiled in its pod, which therefore has to know the settings of the registration
@dynamic(**small_resources(), environment=registered_environment())
def train_on_gpus(gpus: int, hp: Hyperparameters, options: RunOptions) -> TrainingOutputs:
    """Trains in a pod with so many GPUs; 0 is a small pod without any. A local run uses what the machine has."""
    data = prepare_dataset(name=resolve_dataset(hp=hp, options=options))
    return pytorch_mnist_task(hp=hp, data=data, options=options).with_overrides(**training_sizes(gpus))


@workflow
def training_on_gpus_wf(
    gpus: int = 1,
    hp: Hyperparameters = Hyperparameters(),
    options: RunOptions = RunOptions(),
) -> TrainingOutputs:
    """As workflows.mnist.pytorch_training_wf, in a pod with so many GPUs (0 for none)."""
    return train_on_gpus(gpus=gpus, hp=hp, options=options)
