"""The autoencoder's tasks: from typed Flyte inputs to a training under Lightning and back to typed outputs."""

from dataclasses import dataclass
from typing import NamedTuple

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.summaries import RunSummary
from flyte_ddp.attempt.trained import Trained
from flyte_ddp.autoencoder.settings import AutoencoderHyperparameters
from flyte_ddp.code.code_version import code_version
from flyte_ddp.flyte1.caching import CodeVersion, OnClustersOnly
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.flyte1.prepare import resolve_name
from flyte_ddp.flyte1.resources import small_resources
from flyte_ddp.flyte1.train import files_of
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.lightning.settings import LightningOptions
from flyte_ddp.lightning.task import OfLightning, check_lightning

MODULE = "flyte_ddp.autoencoder.module"


@dataclass(frozen=True)
class AutoencoderSummary(RunSummary):
    """The figures of a run.

    Attributes:
        dataset: what the network was trained on (digits where it stood in for MNIST).
        test_loss: mean squared error per pixel (from 0 to 1) on the test images, which are used for nothing else.
    """

    dataset: str
    test_loss: float


class AutoencoderOutputs(NamedTuple):
    """The outputs of a run.

    Attributes:
        train_losses: mean squared error per pixel over each epoch's training.
        validation_losses: the same on the held-out training images after each epoch.
        model_state: the weights as a plain CPU state_dict, see flyte_ddp.autoencoder.network.load_autoencoder.
        summary: the figures.
        report: an HTML page in one file.
        logs: a folder with the test images' codes, and what ranks and trackers wrote.
    """

    train_losses: list[float]
    validation_losses: list[float]
    model_state: PythonPickledFile
    summary: AutoencoderSummary
    report: FlyteFile["html"]  # noqa: F821
    logs: FlyteDirectory


class AutoencoderTraining(OfLightning[AutoencoderOutputs]):
    """Trains on a prepared dataset."""

    def outputs_of(self, trained: Trained) -> AutoencoderOutputs:
        result = trained.results[0]
        summary = AutoencoderSummary(**vars(trained.figures), dataset=trained.dataset, test_loss=result.tested["loss"])
        return AutoencoderOutputs(
            [epoch.train["loss"] for epoch in result.epochs],
            [epoch.validation["loss"] for epoch in result.epochs],
            *files_of(trained, summary),
        )


autoencoder = AutoencoderTraining(f"{MODULE}:LitAutoencoder", f"{MODULE}:PreparedImages")


@task(
    task_config=OnClustersOnly(),
    cache=Cache(
        policies=CodeVersion(code_version(__name__, "flyte_ddp.flyte1.prepare", "flyte_ddp.attempt.datasets"), ()),
        ignored_inputs="options",
    ),
    **small_resources(),
)
def resolve_for_autoencoder(hp: AutoencoderHyperparameters, options: LightningOptions) -> str:
    """The name of the dataset to train on; not cached in local runs, which may need a stand-in.

    A local run finds out here, before anything is downloaded or spawned, whether this machine can do what is asked.
    """
    if is_local():
        check_lightning(hp, options)
        choose_world(hp.backend, options.nproc, hp.batch_size)
    return resolve_name(hp.dataset)
