"""Checks a training on many nodes before they start. No torch: it would not fit into a small pod."""

import json

from flytekit import Cache, task

from flyte_ddp.code_version import code_version
from flyte_ddp.errors import InputError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.tasks.caching import CodeVersion, OnClustersOnly
from flyte_ddp.tasks.execution import is_local
from flyte_ddp.tasks.registration import registration
from flyte_ddp.tasks.resources import dynamic_resources, registered_environment


@task(
    task_config=OnClustersOnly(),
    cache=Cache(policies=CodeVersion(code_version(__name__), ()), salt=json.dumps(registered_environment())),
    **dynamic_resources(),
)
def resolve_for_nodes(hp: Hyperparameters, auto: str = "mnist") -> str:
    """The name of the dataset to train on; refuses inputs that the nodes would refuse only after they have started."""
    if is_local():
        raise InputError("many nodes need a cluster: register this workflow, or run the one for a single machine here")
    asked = registration()
    ranks = asked.node_range[1] * asked.ranks_per_node
    if hp.batch_size < ranks:
        raise InputError(f"batch_size must be at least the number of ranks ({ranks}), got {hp.batch_size}: raise it")
    return auto if hp.dataset == "auto" else hp.dataset
