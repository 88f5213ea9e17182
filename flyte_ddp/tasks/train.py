"""The training task's body: from typed Flyte inputs to ranks and back to typed outputs."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Tuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.observers.predictions import read_predictions
from flyte_ddp.observers.record import RunFinished, Setting
from flyte_ddp.observers.summary import say_summary
from flyte_ddp.observers.surroundings import surroundings
from flyte_ddp.tasks.checkpoints import checkpoint_store
from flyte_ddp.tasks.execution import flyte_retries, is_local, run_dir
from flyte_ddp.tasks.logs import kept_logs
from flyte_ddp.tasks.observing import attempt, observing, tracking_id
from flyte_ddp.tasks.resources import check_gpus
from flyte_ddp.tasks.versions import TRAINING_SOURCES, check_registered_code
from flyte_ddp.training import launcher, prepared
from flyte_ddp.training.code_version import code_version
from flyte_ddp.training.description import DatasetDescription
from flyte_ddp.training.environment import World, choose_world, visible_gpus
from flyte_ddp.training.events import Event
from flyte_ddp.training.hyperparameters import Hyperparameters, RunOptions
from flyte_ddp.training.job import Identity, Job, TrainingResult

WORKER = "flyte_ddp.training.worker:run"  # a name, because importing it would import torch
TRAINING_CODE = (TRAINING_SOURCES, ("torch",))


@dataclass(frozen=True)
class TrainingSummary:
    """What came out, in figures.

    Attributes:
        dataset: what the model was trained on (digits where it stood in for MNIST).
        train_samples: number of training images.
        test_samples: number of test images.
        test_loss: mean loss on the test images after the last epoch.
        accuracy: share of the test images classified correctly after the last epoch, from 0 to 1.
        class_accuracies: the same for each class that has test images, by name.
        train_seconds: in the training loops alone.
        total_seconds: of the whole task.
        samples_per_second: training images, all ranks together, per second of train_seconds.
        world_size: number of ranks.
        backend: nccl or gloo.
        device: cuda or cpu.
        precision: float32 or bfloat16.
        tracking_url: of the Weights & Biases run; empty without one.
        warnings: when and why the training did not learn as it should; empty if all went well.
    """

    dataset: str
    train_samples: int
    test_samples: int
    test_loss: float
    accuracy: float
    class_accuracies: Dict[str, float]
    train_seconds: float
    total_seconds: float
    samples_per_second: float
    world_size: int
    backend: str
    device: str
    precision: str
    tracking_url: str
    warnings: List[str]


class TrainingOutputs(NamedTuple):
    """What a training run gives back.

    Attributes:
        epoch_accuracies: on the test split after each epoch, from 0 to 1.
        model_state: the trained weights, a CPU state_dict.
        summary: the figures.
        report: a page to look at, in one file.
        logs: a folder with the test split's predictions, and what the ranks, trackers and the profiler have written.
    """

    epoch_accuracies: List[float]
    model_state: PythonPickledFile
    summary: TrainingSummary
    report: FlyteFile["html"]  # noqa: F821
    logs: FlyteDirectory


@flyte_retries()
def train(hp: Hyperparameters, data: FlyteDirectory, options: RunOptions) -> TrainingOutputs:
    """Trains hp.model on a prepared dataset with one process per rank; see launcher.launch for what it raises."""
    check_gpus(visible_gpus())
    world = choose_world(hp.backend, options.nproc, hp.batch_size)
    launcher.warm_up()  # imports torch while the data arrive and are verified

    def start(job: Job, on_event: Callable[[Event], None]) -> List[TrainingResult]:
        return launcher.launch(WORKER, world, job, options.timeout_seconds, on_event)

    return train_by(start, world, hp, data, options)


def train_by(
    start: Callable[[Job, Callable[[Event], None]], List[TrainingResult]],
    world: World,
    hp: Hyperparameters,
    data: FlyteDirectory,
    options: RunOptions,
) -> TrainingOutputs:
    """All that surrounds the ranks of a run, which start(job, on_event) runs; it returns their results by rank."""
    started = time.time()
    check_registered_code()
    with flyte_retries():
        data_folder = Path(data.download())
        description = prepared.verify(data_folder)
        identity = Identity(hp, description.digest, code_version(*TRAINING_CODE))
        with (
            run_dir(description.name) as folder,
            kept_logs(folder) as logs,
            checkpoint_store(identity.key, options.resume) as store,
        ):
            job = Job(
                identity=identity,
                data=str(data_folder),
                model_path=str(folder / "model.pt"),
                predictions_path=str(logs.folder / "predictions.npy"),
                profile_path=str(logs.folder / "profile") if options.profile else "",
                checkpoint_path=str(store.path),
                checkpoint_seconds=options.checkpoint_seconds,
                # beyond the parent's own patience, so that it can still ask all ranks where they hang
                timeout_seconds=options.timeout_seconds + 60,
                launched=time.time(),
            )
            setting = Setting(
                name=folder.name,
                tracking_id=tracking_id(identity.key, store.path),
                attempt=attempt(),
                hp=hp,
                options=options,
                data=data_folder,
                description=description,
                data_seconds=job.launched - started,
                logs=logs.folder,
                surroundings=surroundings(),
            )
            with observing(setting, folder / "report.html", store.on_event, logs.on_event) as observers:
                results = start(job, observers)
                finished = RunFinished(results, Path(job.predictions_path), time.time() - started)
                observers.end(finished)
    say_summary(observers.record, Path(job.model_path), folder / "report.html", show_paths=is_local())
    by_class = read_predictions(finished.predictions_path, data_folder).class_accuracies()
    summary = summarise(description, world, finished, observers.tracking_url, by_class)
    # A local run's files stay where they are: flytekit would copy them to a temporary place
    remote = False if is_local() else None
    return TrainingOutputs(
        epoch_accuracies=[epoch.accuracy for epoch in results[0].epochs],
        model_state=PythonPickledFile(job.model_path, remote_path=remote),
        summary=summary,
        report=FlyteFile(str(folder / "report.html"), remote_path=remote),
        logs=FlyteDirectory(str(logs.folder), remote_directory=logs.place),
    )


def summarise(
    description: DatasetDescription,
    world: World,
    finished: RunFinished,
    tracking_url: str,
    by_class: List[Tuple[int, int]],
) -> TrainingSummary:
    result = finished.results[0]
    last, train_seconds = result.epochs[-1], sum(epoch.train_seconds for epoch in result.epochs)
    return TrainingSummary(
        dataset=description.name,
        train_samples=description.train_samples,
        test_samples=description.test_samples,
        test_loss=last.test_loss,
        accuracy=last.accuracy,
        class_accuracies={
            name: right / count for name, (right, count) in zip(description.classes, by_class, strict=True) if count
        },
        train_seconds=train_seconds,
        total_seconds=finished.total_seconds,
        samples_per_second=sum(epoch.samples for epoch in result.epochs) / train_seconds,
        world_size=world.size,
        backend=world.backend,
        device=world.device,
        precision=result.precision,
        tracking_url=tracking_url,
        warnings=[warning.reason for warning in result.warnings],
    )
