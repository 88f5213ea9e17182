"""From a dataset's name to the prepared dataset, as Flyte tasks."""

from flytekit import Cache, HashMethod, Resources, task
from flytekit.types.directory import FlyteDirectory
from typing_extensions import Annotated

from workflows.observers.console import say
from workflows.tasks.execution import flyte_retries, forget_lost_results, is_local
from workflows.tasks.versions import DATA_SOURCES, CodeVersion
from workflows.training import datasets, prepared
from workflows.training.environment import choose_world
from workflows.training.errors import DownloadError
from workflows.training.hyperparameters import Hyperparameters, RunOptions


def content_digest(directory: FlyteDirectory) -> str:
    return prepared.read_description(str(directory)).digest


PreparedDataset = Annotated[FlyteDirectory, HashMethod(content_digest)]


@task(requests=Resources(cpu="500m", mem="500Mi"))
def resolve_dataset(hp: Hyperparameters, options: RunOptions) -> str:
    """The name of the dataset to train on; never cached, so that a stand-in is never remembered.

    A local run finds out here, before anything is downloaded or spawned, whether this machine can do what is asked.
    """
    if not is_local():
        return "mnist" if hp.dataset == "auto" else hp.dataset
    choose_world(hp.backend, options.nproc, hp.batch_size)
    forget_lost_results(prepare_dataset.name, "workflows.mnist.pytorch_mnist_task")
    if hp.dataset != "auto":
        return hp.dataset
    try:
        datasets.prepare("mnist")
    except DownloadError as error:
        say(
            f"MNIST cannot be had here, so this run trains on digits, scikit-learn's 1,797 handwritten digits.\n{error}"
        )
        return "digits"
    return "mnist"


@task(
    cache=Cache(policies=CodeVersion(DATA_SOURCES, []), serialize=True),
    retries=3,
    requests=Resources(cpu="1", mem="2Gi", ephemeral_storage="2Gi"),
)
def prepare_dataset(name: str) -> PreparedDataset:
    """Downloads and prepares the named dataset (see workflows.training.prepared for its form)."""
    with flyte_retries():
        folder = datasets.prepare(name)
    # A local run uses the folder where it is: a copy would only land in a temporary place
    return FlyteDirectory(str(folder), remote_directory=False if is_local() else None)
