"""The built-in datasets, by name."""

from functools import partial
from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.platform_storage import open_file
from flyte_ddp.attempt.registration import registration
from flyte_ddp.data.sources import datasets
from flyte_ddp.errors import DownloadError, InputError
from flyte_ddp.launch import environment
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import download_progress, say
from flyte_ddp.settings import RunOptions


def check_ranks(platform: Platform, hp: Hyperparameters, options: RunOptions) -> None:
    """Check, before anything is downloaded or spawned, whether this machine can do a local run. Raises InputError."""
    if not hp.validation_fraction:
        hp.check_validation(options.keep_best)
    if platform.is_local():
        environment.choose_world(hp.backend, options.nproc, hp.batch_size, hp.virtual_ranks)


def check_nodes(platform: Platform, hp: Hyperparameters) -> None:
    """Refuse settings that the registered nodes would refuse only after they have started. Raises InputError."""
    if platform.is_local():
        raise InputError("many nodes need a cluster: register this file, or run the one for a single machine here")
    asked = registration()
    ranks = asked.node_range[1] * asked.ranks_per_node
    environment.check_ranks(ranks, hp.batch_size, hp.virtual_ranks)


def resolve_name(platform: Platform, asked: str, auto: str = "mnist") -> str:
    """Return the dataset that a name or "auto" stands for.

    A local run may need a stand-in, and discards damaged data.
    """
    name = auto if asked == "auto" else asked
    if not platform.is_local():
        return name
    datasets.discard_damaged(name)
    if asked == "auto" and not is_available(platform, name):
        name = "digits"
        datasets.discard_damaged(name)
    return name


def is_available(platform: Platform, name: str) -> bool:
    """Return whether a dataset is prepared, or can be prepared now. If not, print why."""
    if datasets.prepared_dir(name).exists():
        return True
    try:
        prepare(platform, name)
    except DownloadError as error:
        say(f"{name} cannot be downloaded here: this run trains on digits, scikit-learn's 1,797 images.\n{error}")
        return False
    return True


def prepare(platform: Platform, name: str) -> Path:
    """Return the folder of the prepared dataset, after downloading and writing what is missing."""
    with download_progress() as progress:
        return datasets.prepare(name, progress, partial(open_file, platform))
