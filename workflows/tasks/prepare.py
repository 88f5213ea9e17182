"""From a dataset's name to the prepared dataset, as Flyte tasks."""

from flytekit import Cache, HashMethod, task
from flytekit.types.directory import FlyteDirectory
from typing_extensions import Annotated

from workflows.observers.console import download_progress, say
from workflows.tasks.execution import flyte_retries, forget_lost_results, is_local
from workflows.tasks.resources import preparation_resources, small_resources
from workflows.tasks.versions import DATA_SOURCES, CodeVersion
from workflows.training import datasets, prepared
from workflows.training.environment import choose_world
from workflows.training.errors import DownloadError
from workflows.training.hyperparameters import Hyperparameters, RunOptions


def content_digest(directory: FlyteDirectory) -> str:
    return prepared.read_description(str(directory)).digest


PreparedDataset = Annotated[FlyteDirectory, HashMethod(content_digest)]


@task(**small_resources())
def resolve_dataset(hp: Hyperparameters, options: RunOptions) -> str:
    """The name of the dataset to train on; never cached, so that a stand-in is never remembered.

    A local run finds out here, before anything is downloaded or spawned, whether this machine can do what is asked.
    """
    if is_local():
        choose_world(hp.backend, options.nproc, hp.batch_size)
    return resolve_name(hp.dataset)


def resolve_name(asked: str) -> str:
    """The dataset that a name or auto stands for; in a local run, what is damaged or lost is forgotten here."""
    if not is_local():
        return "mnist" if asked == "auto" else asked
    name = mnist_or_stand_in() if asked == "auto" else asked
    datasets.discard_damaged(name)
    forget_lost_results()
    return name


def mnist_or_stand_in() -> str:
    """mnist, or digits where MNIST is neither prepared nor to be had."""
    try:
        with download_progress() as progress:
            datasets.prepare("mnist", progress)
    except DownloadError as error:
        say(
            f"MNIST cannot be had here, so this run trains on digits, scikit-learn's 1,797 handwritten digits.\n{error}"
        )
        return "digits"
    return "mnist"


@task(
    cache=Cache(policies=CodeVersion(DATA_SOURCES, []), serialize=True),
    retries=3,
    **preparation_resources(),
)
def prepare_dataset(name: str) -> PreparedDataset:
    """Downloads and prepares the named dataset (see workflows.training.prepared for its form)."""
    with flyte_retries(), download_progress() as progress:
        folder = datasets.prepare(name, progress)
    # A local run uses the folder where it is: a copy would only land in a temporary place
    return FlyteDirectory(str(folder), remote_directory=False if is_local() else None)
