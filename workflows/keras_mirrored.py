"""A Keras network under tf.distribute: one process with a replica per device, or two workers that meet on loopback.

pyflyte run workflows/keras_mirrored.py keras_mirrored_wf --hp '{"strategy": "multi_worker"}'
"""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Callable, List, NamedTuple

from flytekit import task, workflow
from flytekit.types.file import FlyteFile

from flyte_ddp.code_version import code_version
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.events import EpochFinished, Event
from flyte_ddp.keras import rank as mirrored
from flyte_ddp.keras.job import MirroredHyperparameters, MirroredJob, MirroredResult
from flyte_ddp.keras.page import mirrored_page
from flyte_ddp.keras.ports import free_ports
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World, nvidia_devices
from flyte_ddp.launch.failures import RankFailed
from flyte_ddp.report.console import say, say_remark
from flyte_ddp.storage import write_whole, writing_to
from flyte_ddp.tasks.checkpoints import checkpoint_store, training_key
from flyte_ddp.tasks.execution import flyte_retries, is_local, run_dir
from flyte_ddp.tasks.logs import kept_logs
from flyte_ddp.tasks.observing import all_of, deck_publisher
from flyte_ddp.tasks.pyflyte import set_up_pyflyte
from flyte_ddp.tasks.resources import KERAS_IMAGE, check_gpus, is_named, training_resources
from flyte_ddp.tasks.versions import KERAS_SOURCES

WORKER = f"{mirrored.__name__}:run"  # imported here, so that Flyte ships it; TensorFlow is not
TIMEOUT_SECONDS = 300.0  # without a step, after which the run counts as hung

set_up_pyflyte()


@dataclass(frozen=True)
class MirroredSummary:
    """What came out, in figures.

    Attributes:
        devices: of one process, as CPU:0,CPU:1.
        replicas: of the network, all processes together.
        test_loss: mean cross-entropy of the test samples after the last epoch.
        accuracy: share of the test samples classified correctly after the last epoch, from 0 to 1.
        train_seconds: in the training loop alone.
        total_seconds: of the whole task.
    """

    strategy: str
    devices: str
    replicas: int
    train_samples: int
    test_samples: int
    test_loss: float
    accuracy: float
    train_seconds: float
    total_seconds: float


class MirroredOutputs(NamedTuple):
    """What a training run gives back.

    Attributes:
        epoch_accuracies: on the test samples after each epoch, from 0 to 1.
        model: the network, for keras.models.load_model: features (N, 30) as measured to probabilities (N, 2).
        summary: the figures.
        report: a page to look at, in one file.
    """

    epoch_accuracies: List[float]
    model: FlyteFile["keras"]  # noqa: F821
    summary: MirroredSummary
    report: FlyteFile["html"]  # noqa: F821


def train_mirrored(hp: MirroredHyperparameters) -> MirroredOutputs:
    """Trains the network on scikit-learn's breast-cancer data in processes of their own."""
    started = time.time()
    check_gpus(nvidia_devices())  # TensorFlow, which could count better, is for the processes to import
    if find_spec("tensorflow") is None:
        raise ReportedError('TensorFlow is missing: make keras, or pip install -e ".[tensorflow]"')
    key = training_key(hp, code_version(KERAS_SOURCES, ("tensorflow", "keras")))
    with (
        flyte_retries(),
        run_dir("keras") as folder,
        kept_logs(folder) as logs,
        checkpoint_store(key, resume=True) as store,
    ):
        model, report = folder / "model.keras", folder / "report.html"
        result = train(hp, model, store.on_event, logs.on_event, checkpoint_path=str(store.path), key=key)
        fragment, page = mirrored_page(hp, result)
        with writing_to(folder, "DDP_RUNS_DIR"):
            write_whole(report, page.encode())
        deck_publisher()(fragment)
    if is_local():
        say(f"\nModel:    {model}\nReport:   {report}\nNext:     python -m webbrowser {report.as_uri()}")
    last, remote = result.epochs[-1], False if is_local() else None
    return MirroredOutputs(
        epoch_accuracies=[epoch.test["accuracy"] for epoch in result.epochs],
        model=FlyteFile(str(model), remote_path=remote),
        summary=MirroredSummary(
            strategy=hp.strategy,
            devices=",".join(result.devices),
            replicas=result.replicas,
            train_samples=result.train_samples,
            test_samples=result.test_samples,
            test_loss=last.test["loss"],
            accuracy=last.test["accuracy"],
            train_seconds=sum(epoch.train_seconds for epoch in result.epochs),
            total_seconds=time.time() - started,
        ),
        report=FlyteFile(str(report), remote_path=remote),
    )


def train(
    hp: MirroredHyperparameters,
    model: Path,
    *others: Callable[[Event], None],
    checkpoint_path: str = "",
    key: str = "",
) -> MirroredResult:
    """Trains in hp.processes processes; raises InputError for what only they could find out, else as launch does.

    Others hear of all events; see MirroredJob for the rest.
    """

    def on_event(event: Event) -> None:
        if isinstance(event, EpochFinished):
            say(
                f"Epoch {event.epoch + 1} of {hp.epochs}: test accuracy {event.test['accuracy']:.2%}, "
                f"test loss {event.test['loss']:.4f}, {event.train_seconds:.2f} s of training"
            )
        else:
            say_remark(event)

    size = hp.processes
    world = World(size, size, backend="", device="")  # TensorFlow sees to both
    try:
        with free_ports(size if hp.strategy == "multi_worker" else 0) as ports:
            job = MirroredJob(hp, str(model), checkpoint_path, key, ports)
            tell = all_of(on_event, *others)
            results: List[MirroredResult] = launcher.launch(WORKER, world, job, TIMEOUT_SECONDS, tell, preload=())
    except RankFailed as failed:
        if failed.failure.cause == InputError.__name__:
            raise InputError(failed.failure.message) from None
        raise
    return results[0]


if is_named("keras"):
    # Not cached: the version of TensorFlow belongs into the key, and where tasks are registered there need not be one
    @task(retries=2, enable_deck=True, deck_fields=(), **{**training_resources(), "container_image": KERAS_IMAGE})
    def keras_mirrored_task(hp: MirroredHyperparameters) -> MirroredOutputs:
        """Trains in a pod of an image of its own: TensorFlow is as large as all the rest."""
        return train_mirrored(hp)

    @workflow
    def keras_mirrored_wf(hp: MirroredHyperparameters = MirroredHyperparameters()) -> MirroredOutputs:
        """Trains a Keras network with two hidden layers on several devices.

        Args:
            hp: the network, its training and its devices, in part or whole; the rest takes its defaults.
        """
        return keras_mirrored_task(hp=hp)

else:
    say("workflows/keras_mirrored.py is not registered: no image is named for it (--image keras=NAME)")


if __name__ == "__main__":
    print(keras_mirrored_wf())
