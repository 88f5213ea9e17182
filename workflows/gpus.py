"""The training of workflows/mnist.py with the number of GPUs as an input of each run, not a registered setting."""

from flytekit import Cache, dynamic, workflow
from flytekit.types.file import FlyteFile

from flyte_ddp.code.code_version import code_version
from flyte_ddp.flyte1.caching import CodeVersion, OnClustersOnly
from flyte_ddp.flyte1.data import init_by_content
from flyte_ddp.flyte1.prepare import RESOLVING, prepare_dataset, resolve_dataset
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.resources import dynamic_resources, resize
from flyte_ddp.flyte1.train import TRAINING_CODE, TrainingOutputs
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from workflows.mnist import pytorch_mnist_task

set_up_pyflyte()

OWN_CODE = CodeVersion(code_version("workflows.gpus"), ())


@dynamic(
    task_config=OnClustersOnly(),
    cache=Cache(policies=[TRAINING_CODE, RESOLVING, OWN_CODE], ignored_inputs=("gpus", "options")),
    **dynamic_resources(),
)
def train_on_gpus(
    gpus: int, hp: Hyperparameters, options: RunOptions, init: FlyteFile | None = None
) -> TrainingOutputs:
    """Train in a pod with this many GPUs; 0 is a small pod without any. A local run uses what the machine has."""
    sizes = resize(pytorch_mnist_task, gpus, options.resume_from)
    data = prepare_dataset(name=resolve_dataset(hp=hp, options=options))
    training = pytorch_mnist_task(hp=hp, data=data, options=options, init=init_by_content(init=init))
    return training.with_overrides(**sizes)


@workflow
def training_on_gpus_wf(
    gpus: int = 1,
    hp: Hyperparameters = Hyperparameters(),
    options: RunOptions = RunOptions(),
    init: FlyteFile | None = None,
) -> TrainingOutputs:
    """Train as workflows.mnist.pytorch_training_wf does, in a pod with this many GPUs (0 for none)."""
    return train_on_gpus(gpus=gpus, hp=hp, options=options, init=init)
