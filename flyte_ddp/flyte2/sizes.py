"""A training that continues on fewer nodes if there are not as many as wanted.

Flyte 2 starts all nodes of an action or none. So each size is an action of its own, of the same task with the same
inputs, and each continues from the checkpoint of the one before.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import flyte
from flyte.errors import ActionAbortedError, BaseRuntimeError, MaxQueuedTimeExceededError

from flyte_ddp.attempt.avoided import AvoidedNode, find_nodes, is_avoiding, mark_left
from flyte_ddp.attempt.pod import HANDOVER_VARIABLE, PREVIOUS_VARIABLE
from flyte_ddp.attempt.registration import registration
from flyte_ddp.flyte2 import handover, platform
from flyte_ddp.flyte2.environment import PAUSES, without_nodes
from flyte_ddp.flyte2.flyte_compat import with_replicas
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import say


async def on_available_nodes(train: Any, *inputs: Any) -> Any:
    """Run a task of a clustered environment on one of the numbers of nodes in DDP_NNODES, and return its outputs.

    The function first asks for the largest number. If these nodes are not there within DDP_QUEUE_MINUTES, it asks for
    the next smaller number, and waits for the smallest as long as it takes. If nodes are lost or preempted, or the
    training fails in another way that may not recur, it pauses and asks for the largest number again, and the training
    continues from the last checkpoint. That happens up to DDP_RETRIES times. With a single number, and in a local run,
    the task is called as usual.

    With DDP_AVOID_HOURS, the pods go to none of the nodes whose hardware has failed in an earlier action. If there is
    not even the smallest number of others within DDP_QUEUE_MINUTES, they may go there again.

    Args:
        train: the task.
        inputs: its inputs.

    Raises:
        ActionAbortedError: somebody has aborted the training.
        BaseRuntimeError: a failure that would recur, or the one after DDP_RETRIES others.
        RecoverableError: the storage, in which an action leaves the place of its checkpoints, cannot be read.
    """
    if platform.is_local() or len(registration().node_sizes) == 1:
        return await train(*inputs)
    return await _on_available_nodes(train, inputs, f"{platform.checkpoint_url()}/actions")


async def _on_available_nodes(train: Any, inputs: tuple[Any, ...], folder: str) -> Any:
    """Run the task on one of several numbers of nodes, and return its outputs.

    It does and raises what on_available_nodes() says of several numbers.

    Args:
        train: the task.
        inputs: its inputs.
        folder: the URL of the folder in which each action tells the next one where its checkpoint is. It is the same if
            this action's own pod is lost and comes again: that pod asks for the same actions in the same order, and
            Flyte knows how they have ended.
    """
    asked = registration()
    failures = 0
    previous = ""
    avoided: list[AvoidedNode] = []
    needed: set[str] = set()  # the nodes without which there are too few
    sizes = iter(asked.node_sizes)
    while True:
        nodes = next(sizes)
        left = f"{folder}/{failures}"
        is_smallest = nodes == asked.node_sizes[-1]
        minutes = 0 if is_smallest and not avoided else asked.queue_minutes
        say(f"Training on {nodes} node{'s' * (nodes > 1)}{_describe(avoided)}")
        variables = {HANDOVER_VARIABLE: left, PREVIOUS_VARIABLE: previous}
        try:
            return await _sized(train, nodes, minutes, variables, [one.node for one in avoided])(*inputs)
        except ActionAbortedError:  # somebody wants the training to end
            raise
        except MaxQueuedTimeExceededError:
            say(f"{nodes} nodes were not there within {minutes} minutes (DDP_QUEUE_MINUTES){_describe(avoided)}")
            if is_smallest:
                needed |= {one.node for one in avoided}
                for one in avoided:
                    with suppress(OSError):
                        mark_left(platform, one)  # a pod that comes to this node now stays there
                sizes = iter(asked.node_sizes)
        except BaseRuntimeError as error:
            failure = handover.failure_left(left)
            if failures == asked.retries or (failure and not failure.recoverable):
                raise
            say(f"On {nodes} it has ended ({one_line(error)}), and goes on from its last checkpoint")
            await asyncio.sleep(PAUSES.compute_delay(failures).total_seconds())
            failures = failures + 1
            sizes = iter(asked.node_sizes)
        previous = handover.place_left(left) or previous
        if is_avoiding(platform):
            # All that are listed, whatever the time is: if this pod comes again, it must ask for the same actions
            listed = find_nodes(platform, previous, limit=math.inf)
            avoided = [one for one in listed if one.node not in needed]


def _describe(avoided: Sequence[AvoidedNode]) -> str:
    return f", without {', '.join(one.node for one in avoided)}" if avoided else ""


def _sized(train: Any, nodes: int, minutes: int, variables: dict[str, str], avoided: Sequence[str]) -> Any:
    """Return a copy of a training's task for a number of nodes.

    The copy has no retries, because a retry would ask for the same number of nodes again.

    Args:
        train: the task, which is not changed.
        nodes: the number of nodes.
        minutes: how long the action may wait for its nodes before it fails; 0 for no limit.
        variables: environment variables that are added to those of the pods.
        avoided: nodes on which the pods do not run; ignored if the task names a pod template of the cluster.
    """
    template = train.pod_template
    return train.override(
        short_name=f"{train.short_name} on {nodes}",
        plugin_config=with_replicas(train.plugin_config, nodes),
        retries=flyte.RetryStrategy(0),
        timeout=replace(train.timeout, max_queued_time=timedelta(minutes=minutes)),
        env_vars={**(train.env_vars or {}), **variables},
        pod_template=without_nodes(template, avoided) if isinstance(template, flyte.PodTemplate) else template,
    )
