"""MNIST and CIFAR-10 on many nodes: the same ranks, started by Flyte's PyTorchJob engine.

DDP_NNODES=4 pyflyte ... register workflows is one main node and three workers. It needs flytekitplugins-kfpytorch here
and in the image, and on the cluster Kubeflow's training operator and Flyte's pytorch plugin.
"""

import platform
from typing import Any

from flytekit import Cache, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import TaskPlugins
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from flyte_ddp.observers.console import say
from flyte_ddp.settings import RunOptions
from flyte_ddp.tasks.elastic import failure_of_node, train_rank
from flyte_ddp.tasks.execution import told
from flyte_ddp.tasks.logs import place_of_logs
from flyte_ddp.tasks.nodes import resolve_for_nodes
from flyte_ddp.tasks.prepare import PreparedDataset, prepare_dataset
from flyte_ddp.tasks.pyflyte import set_up_pyflyte
from flyte_ddp.tasks.resources import registered_environment, registration, training_resources
from flyte_ddp.tasks.train import TRAINING_CODE, TrainingOutputs
from flyte_ddp.tasks.versions import CodeVersion
from flyte_ddp.training.errors import RecoverableError
from flyte_ddp.training.hyperparameters import CIFAR10Hyperparameters, Hyperparameters

try:
    from flytekitplugins.kfpytorch import CleanPodPolicy, Elastic, RunPolicy
    from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask
except ModuleNotFoundError:
    say("workflows/multinode.py defines nothing without its plugin: pip install flytekitplugins-kfpytorch")
else:

    class Nodes(Elastic):
        """Elastic, on whose nodes the loss of the first one, where they meet, is worth a retry."""

    class NodesTask(PytorchElasticFunctionTask):
        def execute(self, **inputs: Any) -> Any:
            try:
                return super().execute(**inputs)
            except (RendezvousError, DistError) as error:
                lost = RecoverableError(f"node {platform.node()}: the meeting place of the nodes is lost: {error}")
                raise told(lost, place_of_logs()) from None
            except (FlyteRecoverableException, FlyteUserRuntimeException) as error:
                if not isinstance(error.__context__, ChildFailedError):
                    raise
                recoverable = isinstance(error, FlyteRecoverableException)
                raise failure_of_node(error.__context__, recoverable) from None

    TaskPlugins.register_pythontask_plugin(Nodes, NodesTask)
    set_up_pyflyte()
    asked, arguments = registration(), training_resources()
    rendezvous = dict.fromkeys(("timeout", "join_timeout", "read_timeout"), asked.join_minutes * 60)
    nodes = Nodes(
        nnodes="{}:{}".format(*asked.node_range),
        nproc_per_node=asked.ranks_per_node,
        monitor_interval=1,
        max_restarts=2,  # of all ranks, within an attempt: when one dies, and its pod lives
        rdzv_configs=rendezvous,
        # A lost pod is the end of Flyte's PyTorchJob. The others would wait for it and keep their GPUs, which the next
        # attempt needs
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
        increase_shared_mem=False,  # deprecated; the resources ask for it
    )
    arguments["environment"] = {
        **arguments["environment"],
        # Each pod imports this file: what was asked for goes with it, or it would take itself for something else
        **registered_environment(),
        # A node that joins anew would wait in vain for the address of a store that the nodes have shared before
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # A rank whose peers have gone ends at once, instead of waiting in NCCL until the job's time-out
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }

    @task(
        task_config=nodes,
        cache=Cache(policies=CodeVersion(*TRAINING_CODE), ignored_inputs=("options",), serialize=True),
        retries=2,
        enable_deck=True,
        deck_fields=(),
        **arguments,
    )
    def pytorch_multinode_task(hp: Hyperparameters, data: PreparedDataset, options: RunOptions) -> TrainingOutputs:
        """Trains hp.model on the prepared dataset on all nodes; options.nproc is what was registered."""
        return train_rank(hp, data, options)  # type: ignore[return-value]  # only rank 0's is looked at

    @workflow
    def pytorch_multinode_wf(
        hp: Hyperparameters = Hyperparameters(),
        options: RunOptions = RunOptions(),
    ) -> TrainingOutputs:
        """As workflows.mnist.pytorch_training_wf, on many nodes."""
        data = prepare_dataset(name=resolve_for_nodes(hp=hp))
        return pytorch_multinode_task(hp=hp, data=data, options=options)

    @workflow
    def cifar10_multinode_wf(
        hp: CIFAR10Hyperparameters = CIFAR10Hyperparameters(),
        options: RunOptions = RunOptions(),
    ) -> TrainingOutputs:
        """As workflows.cifar10.cifar10_wf, on many nodes."""
        data = prepare_dataset(name=resolve_for_nodes(hp=hp, auto="cifar10"))
        return pytorch_multinode_task(hp=hp, data=data, options=options)
