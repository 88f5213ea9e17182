"""MNIST and CIFAR-10 on many nodes: the same ranks, started by Flyte's PyTorchJob engine.

DDP_NNODES=4 pyflyte ... register workflows registers four nodes. It needs flytekitplugins-kfpytorch here and in the
image, and on the cluster Kubeflow's training operator and Flyte's pytorch plugin.
"""

from flytekit import task, workflow
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import not_installed
from flyte_ddp.flyte1.data import init_by_content
from flyte_ddp.flyte1.prepare import PreparedDataset, prepare_dataset, resolve_for_multinode
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.train import TrainingOutputs, image_training, training_arguments
from flyte_ddp.recipes.hyperparameters import CIFAR10Hyperparameters, Hyperparameters
from flyte_ddp.report.console import say, show_output
from flyte_ddp.settings import RunOptions

try:
    from flyte_ddp.flyte1.multinode import multinode
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("flytekitplugins"):
        raise
    show_output()
    say(f"workflows/multinode.py defines nothing: it needs {not_installed('flytekitplugins-kfpytorch', 'multinode')}")
else:
    set_up_pyflyte()

    @task(**multinode(training_arguments()))
    def pytorch_multinode_task(
        hp: Hyperparameters, data: PreparedDataset, options: RunOptions, init: FlyteFile | None = None
    ) -> TrainingOutputs:
        """Train hp.model on the prepared dataset on all nodes, with the registered number of ranks."""
        return image_training.run_as_rank(hp, options, data, init)

    @workflow
    def pytorch_multinode_wf(
        hp: Hyperparameters = Hyperparameters(),
        options: RunOptions = RunOptions(),
        init: FlyteFile | None = None,
    ) -> TrainingOutputs:
        """Train as workflows.mnist.pytorch_training_wf does, on many nodes."""
        data = prepare_dataset(name=resolve_for_multinode(hp=hp))
        return pytorch_multinode_task(hp=hp, data=data, options=options, init=init_by_content(init=init))

    @workflow
    def cifar10_multinode_wf(
        hp: CIFAR10Hyperparameters = CIFAR10Hyperparameters(),
        options: RunOptions = RunOptions(),
        init: FlyteFile | None = None,
    ) -> TrainingOutputs:
        """Train as workflows.cifar10.cifar10_wf does, on many nodes."""
        data = prepare_dataset(name=resolve_for_multinode(hp=hp, auto="cifar10"))
        return pytorch_multinode_task(hp=hp, data=data, options=options, init=init_by_content(init=init))
