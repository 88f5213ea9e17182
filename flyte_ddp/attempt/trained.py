"""The surroundings of a training's ranks, however they are started: from fetched data to figures and files."""

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flyte_ddp.attempt.avoided import keep_away, with_bad_nodes_listed
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.restarts import Start
from flyte_ddp.attempt.run import Run, training_run
from flyte_ddp.attempt.summaries import RecipeSummary, RunSummary, TrainingSummary, summarise
from flyte_ddp.code.user_code import UserCode
from flyte_ddp.engine.job import Subject, TrainingResult, make_job
from flyte_ddp.events import StartUp
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.signals import finishing
from flyte_ddp.report.console import say_summary
from flyte_ddp.report.goodput import Attempt, Goodput
from flyte_ddp.report.observers import Observers
from flyte_ddp.report.predictions import Predictions, load_predictions
from flyte_ddp.report.progress import FILE, attempts_in
from flyte_ddp.report.record import RunFinished, RunInfo, tracking_id
from flyte_ddp.report.tensorboard import events_file
from flyte_ddp.settings import RunOptions
from flyte_ddp.whole_files import replacing, write_whole


@dataclass(frozen=True)
class Trained:
    """A training that has succeeded, and its files.

    Attributes:
        recipe: package.module:Name.
        dataset: the name of the data.
        results: the result of each rank.
        predictions: an image classifier's predictions.
        model: the trained weights, a CPU state_dict.
        logs_url: where the platform's storage has the logs; empty for a local run.
    """

    recipe: str
    dataset: str
    results: list[TrainingResult]
    figures: RunSummary
    predictions: Predictions | None
    model: Path
    report: Path
    logs: Path
    logs_url: str

    @property
    def epoch_measures(self) -> list[dict[str, float]]:
        """Return the measures after each evaluation: of the validation samples or, without any, of the test samples."""
        return [epoch.evaluated for epoch in self.results[0].epochs]

    @property
    def epoch_accuracies(self) -> list[float]:
        """Return the accuracies of an image classifier after each evaluation, from 0 to 1."""
        return [measures["accuracy"] for measures in self.epoch_measures]

    def recipe_summary(self) -> RecipeSummary:
        result = self.results[0]
        number = -1 if result.chosen_epoch is None else result.chosen_epoch
        chosen = result.epochs[number] if result.epochs else None
        validation = chosen.validation if chosen else {}  # a user's own loop may end within its first epoch
        return RecipeSummary(
            **vars(self.figures), recipe=self.recipe, measures=result.tested, validation_measures=validation
        )

    def image_summary(self) -> TrainingSummary:
        """Return the figures of an image classifier: those of any training, the test loss and the accuracies.

        The accuracies by class lack classes without test images. Call it only for a built-in image classifier, because
        other trainings have no predictions.
        """
        tested = self.results[0].tested
        predictions = self.predictions
        assert predictions is not None  # a classifier always has predictions
        by_class = zip(predictions.classes, predictions.class_accuracies(), strict=True)
        return TrainingSummary(
            **vars(self.figures),
            dataset=self.dataset,
            test_loss=tested["loss"],
            accuracy=tested["accuracy"],
            class_accuracies={name: right / count for name, (right, count) in by_class if count},
        )


def train_by(
    platform: Platform,
    start: Start,
    world: World,
    fetch: Callable[[], Subject],
    options: RunOptions,
    own_observers: Sequence[UserCode],
    is_by_ranks: bool = False,
) -> Trained:
    """Download the data, run the ranks, and look after the run: its folder, logs, checkpoints, observers and report.

    The process that starts the ranks calls it; on many nodes rank 0 does. In a local run, the run's folder is removed
    if the training fails.

    Args:
        platform: the platform.
        start: start(job, on_event) runs the ranks, and returns their results by rank.
        world: the ranks that there will be.
        fetch: downloads the data, and returns what is trained.
        options: how to run the training.
        own_observers: the user's observers.
        is_by_ranks: whether this process is a rank itself, and the ranks upload the files of a sharded checkpoint.

    Returns:
        The ranks' results, the run's figures, and the paths of model, report and logs.

    Raises:
        RecoverableError: This pod leaves its node, because DDP_AVOID_HOURS avoids the node's hardware.
        Exception: What `fetch` or `start` raises. On a cluster, an error of this library that `start` raises becomes
            the platform's error.
    """
    started = time.time()
    avoided = keep_away(platform, options.resume_from)
    subject = fetch()
    names = subject.dataset, subject.key
    with (
        finishing() as finish_first,
        training_run(platform, *names, options.resume, options.resume_from, is_by_ranks) as run,
    ):
        model = run.folder / "model.pt"
        report = run.folder / "report.html"
        logs = run.logs.folder
        if not run.store.is_given:
            options = replace(options, resume_from="")
        job = make_job(subject, options, model_path=model, checkpoint_path=run.store.path, logs=logs)
        job = replace(job, avoided=avoided, storage=run.store if is_by_ranks and not platform.is_local() else None)
        info = describe_run(platform, subject, options, run)
        continue_tensorboard_file(platform, run, info)
        publish = platform.publisher("Training")
        is_local = platform.is_local()
        goodput = Goodput(started, job.launched - started, earlier_attempts(platform, run, options.resume))
        with Observers(
            info, goodput, run.store, run.logs, own=own_observers, page=report, publish=publish, is_local=is_local
        ) as observers:
            leave_progress(platform, run)
            observers(StartUp("importing torch"))
            finish_first()
            results = with_bad_nodes_listed(platform, start)(job, observers)
            goodput.wait(time.time())
            finished = RunFinished.of(results, logs, goodput)
            observers.end(finished)
    say_summary(observers.record, model, report, show_paths=platform.is_local())
    return Trained(
        recipe=subject.recipe,
        dataset=subject.dataset,
        results=results,
        figures=summarise(world, finished, observers.record.tracking_url),
        predictions=load_predictions(info, finished),
        model=model,
        report=report,
        logs=logs,
        logs_url=run.logs.url,
    )


def describe_run(platform: Platform, subject: Subject, options: RunOptions, run: Run) -> RunInfo:
    """Return what observers get to know of a run before it starts.

    This is its name, settings, options and data, where its logs and checkpoint are, and its tracking id. In a local
    run, find_tracking_id() may write a file for the id.
    """
    return RunInfo(
        name=run.folder.name,
        recipe=subject.recipe,
        tracking_id=find_tracking_id(platform, subject.key, run.store.path),
        attempt=platform.earlier_attempts(),
        settings=subject.settings,
        options=options,
        data=subject.data if isinstance(subject.data, Path) and subject.description else None,
        description=subject.description,
        logs=run.logs.folder,
        checkpoint=run.store.url,
    )


def find_tracking_id(platform: Platform, key: str, checkpoint: Path) -> str:
    """Return an id that all attempts at the training of this key share, and that no other training has.

    On a cluster, the id is computed from the execution and the key. In a local run, it also has a random part, which a
    file beside the checkpoint keeps. If the file or the checkpoint is missing, this function writes the file anew.
    The file is removed with the checkpoint when training has succeeded.

    Args:
        platform: the platform.
        key: the digest of all that determines the result.
        checkpoint: the path of the checkpoint, which need not exist.
    """
    if platform.is_local():
        file = checkpoint.with_name("tracking-id")
        if not checkpoint.exists() or not file.exists():
            write_whole(file, secrets.token_hex(4).encode())
        return f"{key[:8]}-{file.read_text()}"
    execution, _ = platform.execution()
    return tracking_id(key, f"{execution}/{key}")


# --- earlier attempts ---


def earlier_attempts(platform: Platform, run: Run, resume: bool) -> list[Attempt]:
    """Return the earlier attempts at this training, from a progress file; [] if there is none that can be read.

    On a cluster, an earlier process of this attempt may have left the file in the attempt's logs. If that lists no
    attempts, the file in the previous attempt's logs is read. In a local run, the file beside the checkpoint is read,
    if this run continues from a checkpoint of its own.

    Args:
        platform: the platform.
        run: the run.
        resume: whether a local run may continue from its earlier checkpoint. On a cluster, it has no effect.
    """
    if platform.is_local():
        goes_on = resume and run.store.path.exists() and not run.store.is_given
        return attempts_in(_beside_checkpoint(run)) if goes_on else []
    # The progress is that of an earlier process of this attempt, if there was one, or of the attempt before
    for place in (platform.logs_url, platform.previous_logs_url):
        with suppress(Exception), tempfile.TemporaryDirectory() as folder:
            platform.get(f"{place()}/{FILE}", Path(folder, FILE))
            if attempts := attempts_in(Path(folder, FILE)):
                return attempts
    return []


def leave_progress(platform: Platform, run: Run) -> None:
    """Keep a local run's progress beside its checkpoint, for the run that continues from there.

    Elsewhere the logs stay.
    """
    if platform.is_local():
        _link(run.logs.folder / FILE, _beside_checkpoint(run))


def continue_tensorboard_file(platform: Platform, run: Run, info: RunInfo) -> None:
    """Put the TensorBoard file of an earlier attempt into the run's folder, so that this run continues it.

    Nothing happens unless options.tracking is "tensorboard". On a cluster, the file is downloaded from the logs of this
    attempt or else of the previous one. If neither has it, nothing is put there. In a local run, the file lies beside
    the checkpoint, where it is created if it is missing, and the run's folder gets a hard link to it. All errors are
    ignored.
    """
    if info.options.tracking != "tensorboard":
        return
    file = events_file(info)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    if platform.is_local():
        beside = run.store.path.with_name(file.name)
        with suppress(OSError):
            beside.touch()
        _link(beside, file)
        return
    for place in (platform.logs_url, platform.previous_logs_url):
        with suppress(Exception):
            platform.get(f"{place()}/{file.relative_to(run.logs.folder).as_posix()}", file)
            return


def _link(file: Path, other: Path) -> None:
    """Give the file another name, if the disk can."""
    with suppress(OSError), replacing(other) as beside:
        os.link(file, beside)


def _beside_checkpoint(run: Run) -> Path:
    return run.store.path.with_name(FILE)
