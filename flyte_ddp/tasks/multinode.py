"""Training on many nodes, as Flyte's PyTorchJob engine starts them. Needs flytekitplugins-kfpytorch.

DDP_NNODES=4 pyflyte ... register is one main node and three workers.
"""

import platform
from typing import Any

from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import TaskPlugins
from flytekitplugins.kfpytorch import CleanPodPolicy, Elastic, RunPolicy
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from flyte_ddp.errors import RecoverableError
from flyte_ddp.tasks.elastic import error_of_node
from flyte_ddp.tasks.execution import failure_of, task_error
from flyte_ddp.tasks.logs import url_of_logs
from flyte_ddp.tasks.registration import registration
from flyte_ddp.tasks.resources import registered_environment
from flyte_ddp.tasks.webhook import telling_webhook


class Nodes(Elastic):
    """Elastic, except that losing the first node, which hosts the rendezvous, is retried."""


class NodesTask(PytorchElasticFunctionTask):
    @telling_webhook()
    def execute(self, **inputs: Any) -> Any:
        try:
            return super().execute(**inputs)
        except (RendezvousError, DistError) as error:
            lost = RecoverableError(f"node {platform.node()}: the rendezvous of the nodes is lost: {error}")
            raise task_error(failure_of(lost), url_of_logs()) from None
        except (FlyteRecoverableException, FlyteUserRuntimeException) as error:
            if not isinstance(error.__context__, ChildFailedError):
                raise
            raise error_of_node(error.__context__) from None


TaskPlugins.register_pythontask_plugin(Nodes, NodesTask)


def on_many_nodes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Changes the arguments of a @task that trains so that every rank of all nodes runs its function."""
    asked = registration()
    rendezvous = dict.fromkeys(("timeout", "join_timeout", "read_timeout"), asked.join_minutes * 60)
    nodes = Nodes(
        nnodes="{}:{}".format(*asked.node_range),
        nproc_per_node=asked.ranks_per_node,
        monitor_interval=1,
        max_restarts=2,  # of all ranks, within an attempt, when one dies but its pod lives
        rdzv_configs=rendezvous,
        # A lost pod ends Flyte's PyTorchJob. The others would wait for it and hold their GPUs, which the next attempt
        # needs
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
        increase_shared_mem=False,  # deprecated; the resources ask for it
    )
    environment = {
        **arguments["environment"],
        # Each pod imports the workflow's file, and must see the same registration there
        **registered_environment(),
        # Otherwise a node that rejoins would wait in vain for the address of the store that the nodes shared before
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # A rank whose peers are gone ends at once, instead of waiting in NCCL until the job's time-out
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return {**arguments, "task_config": nodes, "environment": environment}
