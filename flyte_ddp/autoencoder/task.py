"""The autoencoder's tasks: from typed Flyte inputs to ranks under Lightning and back to typed outputs."""

import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.checkpoints import training_key
from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.logs import Logs
from flyte_ddp.attempt.pod import check_code, check_gpus
from flyte_ddp.attempt.run import training_run
from flyte_ddp.attempt.webhook import telling_webhook
from flyte_ddp.autoencoder.job import (
    AutoencoderHyperparameters,
    AutoencoderJob,
    AutoencoderOptions,
    AutoencoderResult,
)
from flyte_ddp.autoencoder.page import AutoencoderConsole, page
from flyte_ddp.code_version import code_version
from flyte_ddp.data import prepared
from flyte_ddp.data.held_out import held_out_count
from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.events import all_of
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World, choose_world, visible_gpus
from flyte_ddp.report import wandb_run
from flyte_ddp.report.console import say, say_last
from flyte_ddp.report.tracking import choose_tracking
from flyte_ddp.tasks import platform
from flyte_ddp.tasks.caching import CodeVersion, OnClustersOnly
from flyte_ddp.tasks.outputs import output_file, output_folder, output_page
from flyte_ddp.tasks.platform import is_local
from flyte_ddp.tasks.prepare import resolve_name
from flyte_ddp.tasks.resources import small_resources

WORKER = "flyte_ddp.autoencoder.rank:run"  # a name, because importing it would import torch
AUTOENCODER_CODE = CodeVersion(code_version("flyte_ddp.autoencoder.rank"), ("torch", "lightning"))


@dataclass(frozen=True)
class AutoencoderSummary:
    """The figures of a run.

    Attributes:
        dataset: what the network was trained on (digits where it stood in for MNIST).
        train_samples, validation_samples: how the training images were divided.
        test_loss: mean squared error per pixel (from 0 to 1) on the test images, which are used for nothing else.
        train_seconds: of the epochs, including validation.
        total_seconds: of the whole task.
        world_size: number of ranks.
        backend: nccl or gloo.
        device: cuda or cpu.
        strategy: the name of Lightning's strategy class.
        warnings: when and why training did not learn as it should; empty if all went well.
    """

    dataset: str
    train_samples: int
    validation_samples: int
    test_loss: float
    train_seconds: float
    total_seconds: float
    world_size: int
    backend: str
    device: str
    strategy: str
    warnings: list[str]


class AutoencoderOutputs(NamedTuple):
    """The outputs of a run.

    Attributes:
        train_losses: mean squared error per pixel over each epoch's training.
        validation_losses: the same on the held-out training images after each epoch.
        model_state: the weights as a plain CPU state_dict, see flyte_ddp.autoencoder.network.load_autoencoder.
        summary: the figures.
        report: an HTML page in one file.
        logs: a folder with the test images' codes, and what the ranks and Lightning's logger wrote.
    """

    train_losses: list[float]
    validation_losses: list[float]
    model_state: PythonPickledFile
    summary: AutoencoderSummary
    report: FlyteFile["html"]  # noqa: F821
    logs: FlyteDirectory


@task(
    task_config=OnClustersOnly(),
    cache=Cache(
        policies=CodeVersion(code_version(__name__, "flyte_ddp.tasks.prepare", "flyte_ddp.attempt.datasets"), ()),
        ignored_inputs="options",
    ),
    **small_resources(),
)
def resolve_for_autoencoder(hp: AutoencoderHyperparameters, options: AutoencoderOptions) -> str:
    """The name of the dataset to train on; not cached in local runs, which may need a stand-in.

    A local run finds out here, before anything is downloaded or spawned, whether this machine can do what is asked.
    """
    if is_local():
        check_machine(hp, options)
    return resolve_name(hp.dataset)


def check_machine(hp: AutoencoderHyperparameters, options: AutoencoderOptions) -> World:
    """The ranks to run on this host; raises InputError if it cannot do what is asked."""
    if find_spec("lightning") is None:
        raise InputError(f"the autoencoder needs {not_installed('lightning', 'lightning')}")
    world = choose_world("auto", options.nproc, hp.batch_size)
    if hp.precision == "float16" and world.device == "cpu":
        raise InputError(
            "precision float16 needs a GPU (Lightning's 16-mixed does not run on a CPU) and none is visible here: "
            "use bfloat16 or float32"
        )
    return world


def choose_logger(wish: str) -> str:
    """online, offline, tensorboard or off. Lightning itself would wait long for W&B, and fail the run if it fails."""
    tracking = choose_tracking(wish)
    reason = wandb_run.unreachable() if tracking == "online" else ""
    if reason:
        say(f"Weights & Biases is not available ({reason}); the run is stored in its logs, for `wandb sync`")
    return "offline" if reason else tracking


@telling_webhook(platform)
@platform_errors(platform)
def train_autoencoder(
    hp: AutoencoderHyperparameters, data: FlyteDirectory, options: AutoencoderOptions
) -> AutoencoderOutputs:
    """Trains on a prepared dataset with one process per rank; raises what launcher.launch raises."""
    started = time.time()
    check_code(AUTOENCODER_CODE.code)
    check_gpus(visible_gpus())
    world = check_machine(hp, options)
    launcher.warm_up([*launcher.PRELOAD, "lightning.pytorch"])  # takes seconds, while the data are downloaded
    data_folder = Path(data.download())
    description = prepared.read_description(data_folder)
    held_out = held_out_count(description.train_samples)
    steps = hp.steps_per_epoch((description.train_samples - held_out) * description.passes_per_epoch)
    key = training_key(hp, description.digest, AUTOENCODER_CODE.version)
    with training_run(platform, f"{description.name}-autoencoder", key, options.resume) as run:
        folder, logs, store = run.folder, run.logs, run.store
        job = AutoencoderJob(
            hp=hp,
            options=options,
            name=folder.name,
            data=str(data_folder),
            model_path=str(folder / "model.pt"),
            encoded_path=str(logs.folder / "test.npz"),
            checkpoint_path=str(store.path),
            key=key,
            logs=str(logs.folder),
            tracking=choose_logger(options.tracking),
            steps_per_epoch=steps,
            launched=time.time(),
        )
        on_event = all_of(AutoencoderConsole(), store, logs)
        result: AutoencoderResult = launcher.launch(WORKER, world, job, options.timeout_seconds, on_event)[0]
        summary = AutoencoderSummary(
            dataset=description.name,
            train_samples=description.train_samples - held_out,
            validation_samples=held_out,
            test_loss=result.test_loss,
            train_seconds=sum(epoch.seconds for epoch in result.epochs),
            total_seconds=time.time() - started,
            world_size=world.size,
            backend=world.backend,
            device=world.device,
            strategy=result.strategy,
            warnings=[warning.reason for warning in result.warnings],
        )
        fragment = page(job, result, {"lightning": version("lightning"), **asdict(summary)})
        report = output_page(folder, f"Autoencoder on {description.name}", fragment)
    return outputs_of(job, result, summary, report, logs)


def outputs_of(
    job: AutoencoderJob, result: AutoencoderResult, summary: AutoencoderSummary, report: FlyteFile, logs: Logs
) -> AutoencoderOutputs:
    if is_local():
        say_last(f"Test loss {summary.test_loss:.4f}\nModel:  {job.model_path}\nReport: {report.path}")
    return AutoencoderOutputs(
        train_losses=[epoch.train_loss for epoch in result.epochs],
        validation_losses=[epoch.validation_loss for epoch in result.epochs],
        model_state=output_file(Path(job.model_path), PythonPickledFile),
        summary=summary,
        report=report,
        logs=output_folder(logs.folder, logs.url),
    )
