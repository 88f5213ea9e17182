"""The Keras network's training: from its inputs to processes under tf.distribute and back to typed outputs."""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Callable, List, NamedTuple

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
from flyte_ddp.storage import writing_to
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.checkpoints import checkpoint_store, training_key
from flyte_ddp.tasks.execution import flyte_retries, is_local, run_dir
from flyte_ddp.tasks.logs import kept_logs
from flyte_ddp.tasks.observing import all_of
from flyte_ddp.tasks.outputs import output_file, output_page
from flyte_ddp.tasks.resources import check_gpus
from flyte_ddp.tasks.webhook import telling_webhook

WORKER = f"{mirrored.__name__}:run"  # imported here, so that Flyte ships it; TensorFlow is not
KERAS_CODE = CodeVersion(code_version(mirrored.__name__), ("tensorflow", "keras"))
TIMEOUT_SECONDS = 300.0  # without a step, after which the run counts as hung


@dataclass(frozen=True)
class MirroredSummary:
    """The figures of a training.

    Attributes:
        devices: of one process, such as CPU:0,CPU:1.
        replicas: number of replicas of the network, all processes together.
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
    """The outputs of a training.

    Attributes:
        epoch_accuracies: on the test samples after each epoch, from 0 to 1.
        model: the network, for keras.models.load_model; maps features (N, 30) as measured to probabilities (N, 2).
        summary: the figures.
        report: an HTML page in one file.
    """

    epoch_accuracies: List[float]
    model: FlyteFile["keras"]  # noqa: F821
    summary: MirroredSummary
    report: FlyteFile["html"]  # noqa: F821


@telling_webhook()
def train_mirrored(hp: MirroredHyperparameters) -> MirroredOutputs:
    """Trains the network on scikit-learn's breast-cancer data in processes of their own."""
    started = time.time()
    check_gpus(nvidia_devices())  # TensorFlow would count better, but only the training processes import it
    if find_spec("tensorflow") is None:
        raise ReportedError('TensorFlow is missing: make keras, or pip install -e ".[tensorflow]"')
    key = training_key(hp, KERAS_CODE.version)
    with (
        flyte_retries(),
        run_dir("keras") as folder,
        kept_logs(folder) as logs,
        checkpoint_store(key, resume=True) as store,
    ):
        model = folder / "model.keras"
        result = train(hp, model, store.on_event, logs.on_event, checkpoint_path=str(store.path), key=key)
        with writing_to(folder, "DDP_RUNS_DIR"):
            report = output_page(folder, *mirrored_page(hp, result))
    if is_local():
        page = Path(report.path)
        say(f"\nModel:    {model}\nReport:   {page}\nNext:     python -m webbrowser {page.as_uri()}")
    last = result.epochs[-1]
    return MirroredOutputs(
        epoch_accuracies=[epoch.test["accuracy"] for epoch in result.epochs],
        model=output_file(model),
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
        report=report,
    )


def train(
    hp: MirroredHyperparameters,
    model: Path,
    *others: Callable[[Event], None],
    checkpoint_path: str = "",
    key: str = "",
) -> MirroredResult:
    """Trains in hp.processes processes; raises InputError for what only they can find out, and what launch raises.

    The others receive all events; see MirroredJob for the rest.
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
    world = World(size, size, backend="", device="")  # TensorFlow decides both
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
