"""Training within a Flyte task: from typed inputs to ranks and back to typed outputs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Cache
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.data import prepared
from flyte_ddp.engine.job import PREDICTIONS, Job, Subject, TrainingResult, job_of, subject_of
from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World, choose_world, visible_gpus
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.predictions import Predictions, predictions_of
from flyte_ddp.report.record import RunFinished, RunInfo
from flyte_ddp.report.summary import say_summary
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.settings import RunOptions
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.checkpoints import checkpoint_store
from flyte_ddp.tasks.execution import flyte_retries, is_local, run_dir
from flyte_ddp.tasks.logs import kept_logs
from flyte_ddp.tasks.observing import attempt, observing, tracking_id
from flyte_ddp.tasks.outputs import output_file
from flyte_ddp.tasks.resources import check_gpus, training_resources
from flyte_ddp.tasks.summaries import RunSummary, TrainingSummary, summarise
from flyte_ddp.tasks.webhook import telling_webhook
from flyte_ddp.user_code import UserCode, find_code

WORKER = "flyte_ddp.engine.worker:run"  # a name, because importing it would import torch
IMAGE_CLASSIFIER = find_code("flyte_ddp.recipes.images:ImageClassifier")
TRAINING_CODE = CodeVersion(IMAGE_CLASSIFIER.version)
Start = Callable[[Job, Callable[[Event], None]], list[TrainingResult]]


class TrainingOutputs(NamedTuple):
    """The outputs of an image classifier's training.

    Attributes:
        epoch_accuracies: after each epoch, on the validation split if there is one, else on the test split; 0 to 1.
        model_state: the trained weights, a CPU state_dict; with a validation split those of the best epoch.
        summary: the figures.
        report: an HTML page in one file.
        logs: a folder with predictions on the test split, and what ranks, trackers and profiler wrote; with a
            validation split also last.pt, the weights of the last epoch.
    """

    epoch_accuracies: list[float]
    model_state: PythonPickledFile
    summary: TrainingSummary
    report: FlyteFile["html"]  # noqa: F821
    logs: FlyteDirectory


@dataclass(frozen=True)
class Trained:
    """A training that has succeeded, and its files as a task's outputs."""

    dataset: str
    results: list[TrainingResult]
    figures: RunSummary
    predictions: Predictions | None
    model_state: PythonPickledFile
    report: FlyteFile
    logs: FlyteDirectory


def training_arguments(
    code: CodeVersion = TRAINING_CODE,
    salt: str = "",
    ignored_inputs: Sequence[str] = ("options",),
) -> dict[str, Any]:
    """Arguments of a @task that trains: cache (its version depends on code and salt), retries, live report,
    resources."""
    return {
        "cache": Cache(policies=code, salt=salt, ignored_inputs=tuple(ignored_inputs), serialize=True),
        "retries": 2,
        "enable_deck": True,
        "deck_fields": (),  # only the report, live
        **training_resources(code),
    }


@telling_webhook()
@flyte_retries()
def train(
    hp: Hyperparameters, data: FlyteDirectory, options: RunOptions, init: FlyteFile | None = None
) -> TrainingOutputs:
    """Trains hp.model on a prepared dataset with one process per rank; raises what launcher.launch raises.

    init: a model_state or checkpoint to start from.
    """
    check_gpus(visible_gpus())
    world = choose_world(hp.backend, options.nproc, hp.batch_size)

    def fetch() -> Subject:
        return image_subject(hp, Path(data.download()), None if init is None else Path(init.download()))

    return outputs_of(train_by(spawn(world, options), world, fetch, options))


def image_subject(hp: Hyperparameters, folder: Path, init: Path | None = None) -> Subject:
    """An image classifier and the prepared dataset in the folder, which is verified byte by byte."""
    TRAINING_CODE.check_registered()
    return subject_of(IMAGE_CLASSIFIER, hp, folder, init, prepared.verify(folder))


def outputs_of(trained: Trained) -> TrainingOutputs:
    """The outputs of an image classifier."""
    result, predictions = trained.results[0], trained.predictions
    assert predictions is not None  # a classifier has them
    by_class = zip(predictions.classes, predictions.class_accuracies(), strict=True)
    summary = TrainingSummary(
        **vars(trained.figures),
        dataset=trained.dataset,
        test_loss=result.tested["loss"],
        accuracy=result.tested["accuracy"],
        class_accuracies={name: right / count for name, (right, count) in by_class if count},
    )
    accuracies = [epoch.evaluated["accuracy"] for epoch in result.epochs]
    return TrainingOutputs(accuracies, trained.model_state, summary, trained.report, trained.logs)


def spawn(world: World, options: RunOptions, root: str = "") -> Start:
    """Lets this process start the ranks, which import torch while the data are downloaded and verified."""
    launcher.warm_up()

    def start(job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
        return launcher.launch(WORKER, world, job, options.timeout_seconds, on_event, root=root)

    return start


def train_by(
    start: Start,
    world: World,
    fetch: Callable[[], Subject],
    options: RunOptions,
    own_observers: Sequence[UserCode] = (),
) -> Trained:
    """Does everything around the ranks of a run.

    start: runs the ranks for (job, on_event), and returns their results by rank. fetch: downloads the data.
    own_observers: the user's.
    """
    started = time.time()
    with flyte_retries():
        subject = fetch()
        with (
            run_dir(subject.dataset) as folder,
            kept_logs(folder) as logs,
            checkpoint_store(subject.key, options.resume) as store,
        ):
            model, found = folder / "model.pt", logs.folder / PREDICTIONS
            job = job_of(subject, options, model_path=model, checkpoint_path=store.path, logs=logs.folder)
            info = info_of(subject, options, folder.name, job.launched - started, logs.folder, store.path)
            with observing(info, folder / "report.html", store, logs, own=own_observers) as observers:
                results = start(job, observers)
                finished = RunFinished(results, found if found.exists() else None, time.time() - started)
                observers.end(finished)
    say_summary(observers.record, model, folder / "report.html", show_paths=is_local())
    return Trained(
        dataset=subject.dataset,
        results=results,
        figures=summarise(world, finished, observers.record.tracking_url),
        predictions=predictions_of(info, finished),
        model_state=output_file(model, PythonPickledFile),
        report=output_file(folder / "report.html"),
        logs=logs.output,
    )


def info_of(
    subject: Subject, options: RunOptions, name: str, data_seconds: float, logs: Path, checkpoint: Path
) -> RunInfo:
    """What observers know of a run before it starts."""
    return RunInfo(
        name=name,
        recipe=subject.recipe,
        tracking_id=tracking_id(subject.key, checkpoint),
        attempt=attempt(),
        settings=subject.settings,
        options=options,
        data=subject.data if isinstance(subject.data, Path) and subject.description else None,
        description=subject.description,
        data_seconds=data_seconds,
        logs=logs,
        surroundings=surroundings(),
    )
