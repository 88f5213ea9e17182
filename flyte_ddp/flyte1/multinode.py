"""Training on many nodes, as Flyte's PyTorchJob engine starts them. Needs flytekitplugins-kfpytorch, imports torch.

`DDP_NNODES=4 pyflyte ... register` asks for one main node and three workers.
"""

from typing import Any

from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekitplugins.kfpytorch import CleanPodPolicy, Elastic, RunPolicy
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from flyte_ddp.attempt.checkpoints import point_to_previous
from flyte_ddp.attempt.failures import attempt_error, format_urls, to_failure
from flyte_ddp.attempt.multinode import failure_of_node, make_restart_rule
from flyte_ddp.attempt.registration import registration
from flyte_ddp.attempt.requested import registered_environment
from flyte_ddp.attempt.webhook import notifying_webhook
from flyte_ddp.errors import RecoverableError
from flyte_ddp.flyte1 import platform
from flyte_ddp.launch.environment import host_name
from flyte_ddp.launch.launch_compat import restarts_only


class Multinode(Elastic):
    """The Elastic task_config, with a retry after losing the first node, which hosts the rendezvous."""


class MultinodeTask(PytorchElasticFunctionTask):
    """A task whose function torchrun's agent runs on each rank of this node."""

    def execute(self, **inputs: Any) -> Any:
        point_to_previous(platform)  # the attempt may end here, if not all nodes come
        try:
            with restarts_only(make_restart_rule()):
                return super().execute(**inputs)
        except IgnoreOutputs:  # nodes without rank 0 raise it when all has gone well
            raise
        except Exception as error:
            with notifying_webhook(platform):
                raise error_of_node(error) from None


def error_of_node(error: Exception) -> Exception:
    """Return, without raising it, the error that this node reports to Flyte for a failed training.

    - If `error` was raised while torch's ChildFailedError was handled, it is Flyte's error for the rank of this node
      that failed first.
    - If `error` says that the nodes' rendezvous was lost, it is an error that Flyte retries.
    - Otherwise it is `error` itself.
    """
    if isinstance(error.__context__, ChildFailedError):
        failure = failure_of_node(error.__context__)
    elif isinstance(error, (RendezvousError, DistError)):
        lost = RecoverableError(f"node {host_name()}: the rendezvous of the nodes is lost: {error}")
        failure = to_failure(platform, lost)
    else:
        return error
    return attempt_error(platform, failure, format_urls(platform))


TaskPlugins.register_pythontask_plugin(Multinode, MultinodeTask)


def multinode(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a @task's arguments with which the task runs on all ranks of all nodes, by torchrun.

    The registered settings say how many nodes there may be, from the fewest to the most, how many ranks each has, and
    how long nodes wait for each other. The copy gets a task_config with these numbers, and more variables in
    "environment". A node restarts its ranks at most twice within an attempt.

    Args:
        arguments: the arguments for one node, from training_arguments, with "environment" among them. They are not
            changed.

    Raises:
        InputError: A DDP_ environment variable, such as DDP_NNODES, is invalid.
    """
    asked = registration()
    rendezvous = dict.fromkeys(("timeout", "join_timeout", "read_timeout"), asked.join_minutes * 60)
    nodes = Multinode(
        nnodes="{}:{}".format(*asked.node_range),
        nproc_per_node=asked.ranks_per_node,
        monitor_interval=1,
        max_restarts=2,  # if a rank is lost but its pod lives, all ranks start again within the attempt
        rdzv_configs=rendezvous,
        # A lost pod ends Flyte's PyTorchJob. Without this policy, the other pods would wait for it and hold their GPUs,
        # which the next attempt needs.
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
        increase_shared_mem=False,  # is deprecated; the resources ask for shared memory
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
