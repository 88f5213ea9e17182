"""From a dataset's name to the prepared dataset, as Flyte tasks."""

from typing import Annotated, BinaryIO

from flytekit import Cache, FlyteContextManager, HashMethod, task
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.code_version import code_version
from flyte_ddp.data import datasets, prepared
from flyte_ddp.errors import DownloadError
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import download_progress, say
from flyte_ddp.settings import RunOptions
from flyte_ddp.tasks.caching import CodeVersion, OnClustersOnly
from flyte_ddp.tasks.execution import flyte_retries, forget_lost_results, is_local
from flyte_ddp.tasks.outputs import output_folder
from flyte_ddp.tasks.resources import preparation_resources, small_resources


def dataset_digest(directory: FlyteDirectory) -> str:
    return prepared.read_description(str(directory)).digest


PreparedDataset = Annotated[FlyteDirectory, HashMethod(dataset_digest)]


@task(
    task_config=OnClustersOnly(),
    cache=Cache(policies=CodeVersion(code_version(__name__), ()), ignored_inputs="options"),
    **small_resources(),
)
def resolve_dataset(hp: Hyperparameters, options: RunOptions, auto: str = "mnist") -> str:
    """The name of the dataset to train on, auto being the workflow's own; not cached in local runs, which may need a
    stand-in.

    A local run finds out here, before anything is downloaded or spawned, whether this machine can do what is asked.
    """
    if is_local():
        choose_world(hp.backend, options.nproc, hp.batch_size)
    return resolve_name(hp.dataset, auto)


def resolve_name(asked: str, auto: str = "mnist") -> str:
    """The dataset that a name or auto stands for; a local run also discards damaged data and lost cache entries."""
    name = auto if asked == "auto" else asked
    if not is_local():
        return name
    datasets.discard_damaged(name)
    if asked == "auto" and not is_available(name):
        name = "digits"
        datasets.discard_damaged(name)
    forget_lost_results()
    return name


def is_available(name: str) -> bool:
    """Whether a dataset is prepared, or can be prepared now; if not, prints why."""
    if datasets.prepared_dir(name).exists():
        return True
    try:
        with download_progress() as progress:
            datasets.prepare(name, progress, open_stored)
    except DownloadError as error:
        say(f"{name} cannot be downloaded here: this run trains on digits, scikit-learn's 1,797 images.\n{error}")
        return False
    return True


def open_stored(url: str) -> BinaryIO:
    """Opens a file in object storage, with Flyte's settings for it."""
    file: BinaryIO = FlyteContextManager.current_context().file_access.get_filesystem_for_path(url).open(url, "rb")
    return file


@task(
    cache=Cache(policies=CodeVersion(code_version("flyte_ddp.data.datasets"), ()), serialize=True),
    retries=3,
    **preparation_resources(),
)
def prepare_dataset(name: str) -> PreparedDataset:
    """Downloads and prepares the named dataset (for the format see flyte_ddp.data.prepared)."""
    with flyte_retries(), download_progress() as progress:
        folder = datasets.prepare(name, progress, open_stored)
    # A local run uses the folder where it is: a copy would only land in a temporary place
    return output_folder(folder)
