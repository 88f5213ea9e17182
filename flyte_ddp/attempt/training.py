"""A training on whatever platform runs it: all that happens around the ranks, from the fetched data to the figures."""

import pkgutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from flyte_ddp.attempt.checkpoints import NewStore, PlatformStore, point_to_previous
from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.observing import Observers, tracking_id
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.pod import check_code, check_gpus
from flyte_ddp.attempt.restarts import Start, restarting
from flyte_ddp.attempt.run import Run, training_run
from flyte_ddp.attempt.summaries import RecipeSummary, RunSummary, TrainingSummary, summarise
from flyte_ddp.attempt.webhook import telling_webhook
from flyte_ddp.code.user_code import UserCode, find_code
from flyte_ddp.data.description import StoredData
from flyte_ddp.data.prepared import prepared
from flyte_ddp.engine.job import PREDICTIONS, Job, Subject, TrainingResult, job_of, subject_of
from flyte_ddp.errors import InputError
from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, World, choose_world, visible_gpus
from flyte_ddp.launch.link import Link
from flyte_ddp.model_files.model_metadata import ModelMetadata
from flyte_ddp.report.predictions import Predictions, predictions_of
from flyte_ddp.report.record import RunFinished, RunInfo
from flyte_ddp.report.summary import say_summary
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.settings import RunOptions, TrainingSettings

IMAGE_CLASSIFIER = find_code("flyte_ddp.recipes.images:ImageClassifier")
Given = TypeVar("Given")
Outputs = TypeVar("Outputs")


@dataclass(frozen=True)
class Trained:
    """A training that has succeeded, and its files.

    Attributes:
        recipe: package.module:Name.
        dataset: the name of its data.
        results: by rank.
        predictions: an image classifier's.
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
        """After each evaluation, of the validation samples if there are any, else of the test samples."""
        return [epoch.evaluated for epoch in self.results[0].epochs]

    @property
    def epoch_accuracies(self) -> list[float]:
        """The same of an image classifier, from 0 to 1."""
        return [measures["accuracy"] for measures in self.epoch_measures]

    def recipe_summary(self) -> RecipeSummary:
        result = self.results[0]
        chosen = result.epochs[-1 if result.chosen_epoch is None else result.chosen_epoch]
        return RecipeSummary(
            **vars(self.figures), recipe=self.recipe, measures=result.tested, validation_measures=chosen.validation
        )

    def image_summary(self) -> TrainingSummary:
        """The figures of an image classifier."""
        tested, predictions = self.results[0].tested, self.predictions
        assert predictions is not None  # a classifier has them
        by_class = zip(predictions.classes, predictions.class_accuracies(), strict=True)
        return TrainingSummary(
            **vars(self.figures),
            dataset=self.dataset,
            test_loss=tested["loss"],
            accuracy=tested["accuracy"],
            class_accuracies={name: right / count for name, (right, count) in by_class if count},
        )


class Training(ABC, Generic[Given, Outputs]):
    """How a platform's tasks train something: from data as they are Given to Outputs.

    Attributes:
        worker: what ranks run, beside a train for those of many nodes; a name, because importing it would import torch.
        preload: what the process that they are forked from imports.
    """

    platform: Platform
    worker = "flyte_ddp.engine.worker:run"
    preload: Sequence[str] = launcher.PRELOAD

    def __init__(self, code: UserCode, observers: Sequence[UserCode] = ()):
        """code: the recipe's. observers: the user's."""
        self.code, self.observers = code, observers

    def run(
        self,
        settings: TrainingSettings,
        options: RunOptions,
        data: Given | StoredData | None = None,
        init: Given | None = None,
    ) -> Outputs:
        """Trains with one process per rank, on the file or folder data, if the recipe uses one; on stored data where
        they are, for a recipe that returns Blocks.

        init: what to start from: the model_state of an earlier training; a checkpoint (final-checkpoint in its logs, if
        options.keep_checkpoint was set), from which training continues up to settings.epochs in total; or a folder in
        save_pretrained's layout, the recipe's init_path. Raises what launcher.launch raises, and on a cluster the
        platform's error.
        """

        def fetch() -> Subject:  # while the ranks' first process imports torch
            source = data if isinstance(data, StoredData) else self.downloaded(data)
            return self.subject(settings, source, self.downloaded(init))

        def start(job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
            return launcher.launch(self.worker, world, self.job_of_ranks(job), options, on_event, root=self.code.root)

        with telling_webhook(self.platform), platform_errors(self.platform):
            if options.resume:
                point_to_previous(self.platform)
            self.check(settings, options)
            check_gpus(visible_gpus())
            world = choose_world(settings.backend, options.nproc, self.most_ranks(settings))
            launcher.warm_up(self.preload)
            again = restarting(self.platform, start)
            return self.outputs_of(train_by(self.platform, again, world, fetch, options, self.observers))

    def run_as_rank(
        self,
        settings: TrainingSettings,
        options: RunOptions,
        data: Given | StoredData | None = None,
        init: Given | None = None,
    ) -> Outputs | None:
        """Trains as one rank of many nodes, in a process that the platform has started; outputs on rank 0 only."""
        from flyte_ddp.attempt.multinode import train_as_rank  # imports torch

        def fetch() -> Subject:
            self.check(settings, options)
            source = data if isinstance(data, StoredData) else self.downloaded_once(data)
            return self.subject(settings, source, self.downloaded_once(init))

        def train(environment: Environment, device: Any, link: Link, job: Job) -> TrainingResult:
            worker = pkgutil.resolve_name(self.worker.partition(":")[0])
            result: TrainingResult = worker.train(environment, device, link, self.job_of_ranks(job))
            return result

        trained = train_as_rank(self.platform, settings, options, fetch, self.observers, train)
        return self.outputs_of(trained) if trained else None

    def check(self, settings: TrainingSettings, options: RunOptions) -> None:
        """Raises InputError for what cannot be trained here."""

    def most_ranks(self, settings: TrainingSettings) -> int:
        """How many ranks can share a step."""
        return settings.batch_size

    def job_of_ranks(self, job: Job) -> Job:
        """What the worker is given."""
        return job

    def subject(
        self, settings: TrainingSettings, source: Path | StoredData | None, init: Path | None = None
    ) -> Subject:
        """What is trained, and its data; ReportedError if this pod's code is not what was registered."""
        check_code(self.code.version)
        return subject_of(self.code, settings, source, init)

    @staticmethod
    @abstractmethod
    def downloaded(given: Any) -> Path | None:
        """Where it is, or a copy."""

    @staticmethod
    @abstractmethod
    def downloaded_once(given: Any) -> Path | None:
        """A copy that all ranks of this host share."""

    @abstractmethod
    def outputs_of(self, trained: Trained) -> Outputs:
        """What the task returns."""


class OfImages(Training[Given, Outputs]):
    """That of an image classifier on a prepared dataset."""

    def __init__(self, observers: Sequence[UserCode] = ()):
        super().__init__(IMAGE_CLASSIFIER, observers)

    def subject(
        self, settings: TrainingSettings, source: Path | StoredData | None, init: Path | None = None
    ) -> Subject:
        assert isinstance(source, Path)
        return image_subject(settings, source, init)


def image_subject(hp: TrainingSettings, folder: Path, init: Path | None = None) -> Subject:
    """An image classifier and the prepared dataset in the folder, which is verified byte by byte."""
    check_code(IMAGE_CLASSIFIER.version)
    return subject_of(IMAGE_CLASSIFIER, hp, folder, init, prepared.verify(folder))


def check_classifier(known: ModelMetadata, path: str) -> None:
    """Refuses the weights of a recipe; path: where they are."""
    if known.recipe != IMAGE_CLASSIFIER.name:
        raise InputError(
            f"model_state must be of a built-in classifier, and {path} is of {known.recipe}: docs/your-own-model.md "
            "says what there is for recipes"
        )


def train_by(
    platform: Platform,
    start: Start,
    world: World,
    fetch: Callable[[], Subject],
    options: RunOptions,
    own_observers: Sequence[UserCode],
    stored: NewStore = PlatformStore,
) -> Trained:
    """Does everything around the ranks of a run. start: runs the ranks for (job, on_event); their results by rank.
    stored: see checkpoint_store."""
    started = time.time()
    subject = fetch()
    with training_run(platform, subject.dataset, subject.key, options.resume, options.resume_from, stored) as run:
        model, report, logs = run.folder / "model.pt", run.folder / "report.html", run.logs.folder
        found = logs / PREDICTIONS
        if not run.store.is_given:
            options = replace(options, resume_from="")
        job = job_of(subject, options, model_path=model, checkpoint_path=run.store.path, logs=logs)
        info = info_of(platform, subject, options, run, job.launched - started)
        publish = platform.publisher("Training")
        with Observers(info, report, publish, run.store, run.logs, own=own_observers) as observers:
            results = start(job, observers)
            finished = RunFinished(results, found if found.exists() else None, time.time() - started)
            observers.end(finished)
    say_summary(observers.record, model, report, show_paths=platform.is_local())
    return Trained(
        recipe=subject.recipe,
        dataset=subject.dataset,
        results=results,
        figures=summarise(world, finished, observers.record.tracking_url),
        predictions=predictions_of(info, finished),
        model=model,
        report=report,
        logs=logs,
        logs_url=run.logs.url,
    )


def info_of(platform: Platform, subject: Subject, options: RunOptions, run: Run, data_seconds: float) -> RunInfo:
    """What observers know of a run before it starts."""
    return RunInfo(
        name=run.folder.name,
        recipe=subject.recipe,
        tracking_id=tracking_id(platform, subject.key, run.store.path),
        attempt=platform.earlier_attempts(),
        settings=subject.settings,
        options=options,
        data=subject.data if isinstance(subject.data, Path) and subject.description else None,
        description=subject.description,
        data_seconds=data_seconds,
        logs=run.logs.folder,
        checkpoint=run.store.folder,
        surroundings=surroundings(),
    )
