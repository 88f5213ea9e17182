"""The way from a dataset's name to the prepared dataset, as Flyte tasks.

No torch: it would not fit into a small pod.
"""

import json
import os
from typing import Annotated

from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import Cache, HashMethod, task
from flytekit.core.context_manager import FlyteEntities
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.attempt import datasets
from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import local_paths
from flyte_ddp.attempt.requested import registered_environment
from flyte_ddp.code.code_version import code_version
from flyte_ddp.data.prepared import prepared
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.caching import CodeVersion, OnClustersOnly
from flyte_ddp.flyte1.flytekit_compat import local_cache
from flyte_ddp.flyte1.outputs import output_folder
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.flyte1.resources import dynamic_resources, preparation_resources, small_resources
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions

RESOLVING = CodeVersion(code_version(__name__, "flyte_ddp.attempt.datasets"), ())


def dataset_digest(directory: FlyteDirectory) -> str:
    return prepared.read_description(str(directory)).digest


# A folder in the format of flyte_ddp.data.prepared.prepared. Its content is the key of Flyte's cache.
PreparedDataset = Annotated[FlyteDirectory, HashMethod(dataset_digest)]


@task(
    task_config=OnClustersOnly(),
    cache=Cache(policies=RESOLVING, ignored_inputs="options"),
    **small_resources(),
)
@platform_errors(platform)
def resolve_dataset(hp: Hyperparameters, options: RunOptions, auto: str = "mnist") -> str:
    """Check that the training is possible, and return the name of the dataset to train on; a Flyte task.

    On a cluster, the result is cached, and nothing is downloaded here. A local run never takes the result from a cache,
    because it checks this machine. It also deletes a damaged prepared copy of the dataset, and drops entries of the
    local cache whose files are gone.

    Args:
        hp: the settings of the training.
        options: the options of the run. They are no part of the cache key, so a cached result is not checked for
            keep_best.
        auto: the dataset that hp.dataset "auto" stands for.

    Returns:
        hp.dataset, or `auto` if that is "auto". A local run prepares the dataset for "auto"; if the download fails, the
        name is "digits".

    Raises:
        InputError: keep_best or patience is set without a validation split. In a local run also: this machine cannot
            run the ranks; there are more ranks than virtual ranks, or without these than samples in a batch; or the
            dataset or its folder cannot be used.
    """
    datasets.check_ranks(platform, hp, options)
    return resolve_name(hp.dataset, auto)


@task(
    task_config=OnClustersOnly(),
    cache=Cache(policies=RESOLVING, salt=json.dumps(registered_environment())),
    **dynamic_resources(),
)
@platform_errors(platform)
def resolve_for_multinode(hp: Hyperparameters, auto: str = "mnist") -> str:
    """Return the name of the dataset to train on, on many nodes: hp.dataset, or `auto` if that is "auto".

    It is a Flyte task, which is cached. Raises InputError if this is a local run, or if batch_size or virtual_ranks
    does not suit the largest registered number of ranks.
    """
    datasets.check_nodes(platform, hp)
    return resolve_name(hp.dataset, auto)


def resolve_name(asked: str, auto: str = "mnist") -> str:
    """Return the name of the dataset to train on: `asked`, or `auto` if `asked` is "auto".

    On a cluster, nothing else happens. A local run deletes the prepared dataset of that name if its files are damaged,
    and drops entries of Flyte's local cache whose files are gone. For "auto" it also downloads and prepares the
    dataset, unless it is prepared already; if the download fails, a line on the console says so, and the result is
    "digits".

    Raises:
        InputError: In a local run, the name is unknown, DDP_DATA_MIRROR is wrong, or the folder for datasets cannot be
            written to.
    """
    name = datasets.resolve_name(platform, asked, auto)
    if is_local():
        forget_lost_results()
    return name


def forget_lost_results() -> None:
    """Drop entries of the local cache whose files are gone, so that their tasks run again.

    Only entries of tasks that this process has imported are dropped: all projects of a user share the cache, and
    another project's disk may be back later.
    """
    cache = local_cache()
    ours = tuple(f"{entity.name}-" for entity in FlyteEntities.entities)
    for key in filter(lambda key: key.startswith(ours), list(cache)):
        outputs = LiteralMap.FromString(cache.get(key) or b"")
        if not all(map(os.path.exists, local_paths(outputs.literals.values()))):
            cache.pop(key, None)


@task(
    cache=Cache(policies=CodeVersion(code_version("flyte_ddp.data.sources.datasets"), ()), serialize=True),
    retries=3,
    **preparation_resources(),
)
@platform_errors(platform)
def prepare_dataset(name: str) -> PreparedDataset:
    """Download and prepare the named dataset, in the format of flyte_ddp.data.prepared.prepared."""
    return output_folder(datasets.prepare(platform, name))
