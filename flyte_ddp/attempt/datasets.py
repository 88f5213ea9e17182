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
    """Raise InputError for settings that cannot be trained, before anything is downloaded or spawned.

    keep_best and patience need a validation_fraction. In a local run, this machine must have the GPUs that the backend
    and nproc need. There must also be no more ranks than virtual_ranks or, if that is 0, than samples in a batch.
    """
    if not hp.validation_fraction:
        hp.check_validation(options.keep_best)
    if platform.is_local():
        environment.choose_world(hp.backend, options.nproc, hp.batch_size, hp.virtual_ranks)


def check_nodes(platform: Platform, hp: Hyperparameters) -> None:
    """Raise InputError in a local run, or if more ranks are registered than can share a batch.

    At most virtual_ranks ranks can share a batch, or batch_size ranks if virtual_ranks is 0. The registered ranks are
    those of the largest registered number of nodes.
    """
    if platform.is_local():
        raise InputError("many nodes need a cluster: register this file, or run the one for a single machine here")
    asked = registration()
    ranks = asked.node_range[1] * asked.ranks_per_node
    environment.check_ranks(ranks, hp.batch_size, hp.virtual_ranks)


def resolve_name(platform: Platform, asked: str, auto: str = "mnist") -> str:
    """Return the name of the dataset to train on: `asked`, or `auto` if `asked` is "auto".

    On a cluster, nothing else happens. A local run first deletes the prepared dataset of that name if its files are
    damaged. For "auto", it then downloads and prepares the dataset unless that is prepared already. If the download
    fails, a line on the console says so, and the result is "digits", which needs no download.

    Raises:
        InputError: In a local run, the name is unknown, DDP_DATA_MIRROR is wrong, or the folder for datasets cannot be
            written to.
    """
    name = auto if asked == "auto" else asked
    if not platform.is_local():
        return name
    datasets.discard_damaged(name)
    if asked == "auto" and not datasets.prepared_dir(name).exists():
        try:
            prepare(platform, name)
        except DownloadError as error:
            say(f"{name} cannot be downloaded here: this run trains on digits, scikit-learn's 1,797 images.\n{error}")
            name = "digits"
            datasets.discard_damaged(name)
    return name


def prepare(platform: Platform, name: str) -> Path:
    """Return the folder of the prepared dataset on this machine, after downloading and writing what is missing.

    A progress bar shows the downloads. Raises DownloadError, and InputError as datasets.prepare() does.
    """
    with download_progress() as progress:
        return datasets.prepare(name, progress, partial(open_file, platform))
