"""A training on whatever platform runs it: all that happens around the ranks, from the fetched data to the figures."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

from flyte_ddp.attempt.checkpoints import point_to_previous
from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.pod import check_code, check_gpus
from flyte_ddp.attempt.restarts import restarting
from flyte_ddp.attempt.trained import Trained, train_by
from flyte_ddp.attempt.webhook import notifying_webhook
from flyte_ddp.code.user_code import UserCode, find_code, find_observers
from flyte_ddp.data.description import StoredData
from flyte_ddp.data.prepared import prepared
from flyte_ddp.engine.job import Job, Subject, TrainingResult, make_job, make_subject
from flyte_ddp.errors import InputError
from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, World, choose_world
from flyte_ddp.model_files.model_metadata import ModelMetadata
from flyte_ddp.report.console import open_console
from flyte_ddp.settings import RunOptions, TrainingSettings

IMAGE_CLASSIFIER = find_code("flyte_ddp.recipes.images:ImageClassifier")
PREDICT = "flyte_ddp.engine.predict:run"
Given = TypeVar("Given")
Outputs = TypeVar("Outputs")


class Training(ABC, Generic[Given, Outputs]):
    """A training in a platform's tasks, from data in the platform's types (Given) to the task's Outputs.

    Attributes:
        platform: the platform.
        worker: the name of the function that ranks run, because importing it would import torch. Ranks of many nodes
            call the function train of its module.
        preload: the modules that are imported by the process that ranks are forked from.
        is_script: whether ranks run a script. Then the training itself uploads what they save, and on many nodes one
            process of each node starts that node's ranks.
        outputs: makes the task's outputs of their values by name.
        output_file, output_folder, output_model: functions that return a file, a folder, or a file of weights on this
            machine as an output. A folder may also have its URL in the storage.
    """

    platform: Platform
    outputs: Callable[..., Outputs]
    output_file: Any
    output_folder: Any
    output_model: Any
    worker = "flyte_ddp.engine.worker:run"
    preload: Sequence[str] = launcher.PRELOAD
    is_script = False

    def __init__(self, code: UserCode, observers: Sequence[UserCode] = ()):
        """Set the code of the recipe, and that of the user's observers, which ranks and parent import by its name."""
        self.code = code
        self.observers = observers

    def run(
        self,
        settings: TrainingSettings,
        options: RunOptions,
        data: Given | StoredData | None = None,
        init: Given | None = None,
    ) -> Outputs:
        """Train with one process per rank on this host, and return the task's outputs.

        Call it in a task. On a cluster, ranks that were lost or hang are started again, at most twice, and each of the
        errors below is raised as the platform's error. The webhook, if there is one, is notified of a failure.

        Args:
            settings: what determines the result.
            options: how to run the training.
            data: the file or folder that the recipe uses; or stored data, for a recipe that returns Blocks.
            init: what to start from: the model_state of an earlier training; a checkpoint (final-checkpoint in its
                logs, if options.keep_checkpoint was set), from which training continues up to settings.epochs in total;
                or a folder in save_pretrained's layout, the recipe's init_path.

        Raises:
            InputError: the training cannot be done as asked.
            Exception: what launcher.launch raises.
        """

        def fetch() -> Subject:  # while the ranks' first process imports torch
            source = data if isinstance(data, StoredData) else self.downloaded(data)
            return self.subject(settings, source, self.downloaded(init))

        def start(job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
            return self.launch_ranks(world, job, on_event)

        with self.own_errors(), notifying_webhook(self.platform), platform_errors(self.platform):
            if options.resume:
                point_to_previous(self.platform)
            self.check(settings, options)
            check_gpus()
            world = choose_world(settings.backend, options.nproc, *self.most_ranks(settings))
            launcher.warm_up(self.preload)
            again = restarting(self.platform, start)
            trained = train_by(self.platform, again, world, fetch, options, self.observers, self.is_script)
            return self.make_outputs(trained)

    def run_as_rank(
        self,
        settings: TrainingSettings,
        options: RunOptions,
        data: Given | StoredData | None = None,
        init: Given | None = None,
    ) -> Outputs | None:
        """Train as one rank of many nodes, in a process that the platform has started; all ranks call it.

        Takes the arguments of run(). The ranks of a host share one download of the data.

        Returns:
            The task's outputs on rank 0; None on the other ranks.

        Raises:
            InputError: the training cannot be done as asked, or there are not as many ranks as registered.
            Exception: on a cluster, the platform's error for whatever ends the training.
        """
        from flyte_ddp.attempt.multinode import train_as_rank  # imports torch

        def fetch() -> Subject:
            self.check(settings, options)
            source = data if isinstance(data, StoredData) else self.downloaded_once(data)
            return self.subject(settings, source, self.downloaded_once(init))

        start = self.train_rank
        trained = train_as_rank(self.platform, settings, options, fetch, self.observers, start, self.is_script)
        return self.make_outputs(trained) if trained else None

    def launch_ranks(self, world: World, job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
        """Run all ranks, on this host, and return their results by rank. Raises what launcher.launch raises."""
        job = self.job_of_ranks(job)
        return launcher.launch(self.worker, world, job, job.options, on_event, root=self.code.root)

    def train_rank(
        self, environment: Environment, job: Job, on_event: Callable[[Event], None] | None
    ) -> list[TrainingResult]:
        """Train as one rank of many nodes, and return the results of all ranks, by rank; a collective.

        Args:
            environment: this rank.
            job: the training.
            on_event: is called with each event, on rank 0; None on other ranks.

        Raises:
            Exception: What multinode.run_rank raises.
        """
        from flyte_ddp.attempt.multinode import run_rank  # imports torch

        return run_rank(self.worker.partition(":")[0], environment, self.job_of_ranks(job), on_event)

    def own_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that turns errors of its block into the platform's."""
        return platform_errors(self.platform)

    def check(self, settings: TrainingSettings, options: RunOptions) -> None:
        """Raise InputError for what cannot be trained here. A subclass may override this; by default all can be."""

    def most_ranks(self, settings: TrainingSettings) -> tuple[int, int]:
        """Return what limits the ranks of a step: the samples of its batch and, unless 0, its virtual ranks."""
        return settings.batch_size, settings.virtual_ranks

    def job_of_ranks(self, job: Job) -> Job:
        """Return the job that the worker gets: the same one, unless a subclass adds to it."""
        return job

    def subject(
        self, settings: TrainingSettings, source: Path | StoredData | None, init: Path | None = None
    ) -> Subject:
        """Return recipe, settings and data of a training, after checking that this pod's code is what was registered.

        The content of a path is read whole, for its hash.

        Args:
            settings: what determines the result.
            source: the data: a path on this machine, or data that stay in their storage; None for a recipe without
                data.
            init: the file or folder on this machine to start from; None is none.

        Raises:
            ReportedError: this pod's code is not what was registered.
            InputError: init is a folder without complete weights, or a path may not be read.
        """
        check_code(self.code.version)
        return make_subject(self.code, settings, source, init)

    @staticmethod
    @abstractmethod
    def downloaded(file_or_folder: Any) -> Path | None:
        """Return the path of the file or folder on this machine, after downloading it if necessary; None for None."""

    @staticmethod
    @abstractmethod
    def downloaded_once(file_or_folder: Any) -> Path | None:
        """Return a copy of the file or folder that all ranks of this host share."""

    def make_outputs(self, trained: Trained) -> Outputs:
        """Return the task's outputs: a recipe's, unless a subclass overrides this."""
        return self.outputs(
            epoch_measures=trained.epoch_measures, summary=trained.recipe_summary(), **self.common_outputs(trained)
        )

    def common_outputs(self, trained: Trained) -> dict[str, Any]:
        """Return the outputs that recipes and image classifiers have, by name."""
        return {
            "model_state": self.output_model(trained.model),
            "report": self.output_file(trained.report),
            "logs": self.output_folder(trained.logs, trained.logs_url),
        }


class PredictingTraining(Training[Given, Outputs]):
    """A training of a recipe of this library's engine, which can also predict with what it has trained."""

    def predict(
        self,
        model_state: Given,
        settings: TrainingSettings,
        shard: int = 0,
        shards: int = 1,
        data: Given | StoredData | None = None,
        split: str = "test",
        init: Given | None = None,
    ) -> Any:
        """Return an .npy file with a trained network's predictions (n, ...) for one shard of a split.

        The network computes in float32; the file has the dtype of recipe.predictions(). The file has a row for each
        sample of the shard, in the split's order. The files of all shards, concatenated by number, have the predictions
        of the whole split.

        To compute shards in parallel, map a task over `shard`. Declare it with most_gpus=1 and with arguments(()),
        whose cache ignores no input.

        Args:
            model_state: the weights.
            settings: the settings of the training.
            shard: the number of the shard, from 0.
            shards: the number of shards, into which the split is divided as evenly as possible.
            data: the data of the training.
            split: "train", "test" or, if the recipe has_validation, "validation".
            init: the init of the training.

        Raises:
            InputError: there is no such shard or split, or the recipe has no predictions.
            Exception: on a cluster, the platform's error for that, or for a process that has failed or hangs.
        """
        with self.own_errors():
            source = data if isinstance(data, StoredData) else self.downloaded(data)
            subject = self.subject(settings, source, self.downloaded(init))
            model = self.downloaded(model_state)
            assert model
            if not 0 <= shard < shards:
                raise InputError(f"shard must be at least 0 and below shards ({shards}), got {shard}")
            with run_folder(self.platform, f"{subject.dataset}-predictions") as folder:
                job = make_job(subject, model_path=model, logs=folder)
                world = choose_world("gloo", 1, 1)
                asked = (job, split, shard, shards)
                launcher.run_alone(PREDICT, asked, job.options, open_console(), world, subject.root)
            return self.output_file(folder / f"predictions-{shard}.npy")


class CommonRecipeTraining(PredictingTraining[Given, Outputs]):
    """A training of a recipe, known only by its name: its module, which imports torch, is for the ranks."""

    def __init__(self, recipe: str, data_files: Sequence[str] = (), observers: Sequence[str] = ()):
        """Find the recipe's code. Create the object at the top level of the workflow file, after the imports.

        Args:
            recipe: "package.module:Name".
            data_files: files that the recipe reads, relative to its module's file.
            observers: names of classes, "package.module:Name", with a method for each event that concerns them; no part
                of the cache version.

        Raises:
            InputError: there is no such recipe.
        """
        super().__init__(find_code(recipe, data_files), find_observers(observers))


class ClassifierTraining(PredictingTraining[Given, Outputs]):
    """A training of a built-in image classifier on a prepared dataset."""

    def __init__(self, observers: Sequence[UserCode] = ()):
        super().__init__(IMAGE_CLASSIFIER, observers)

    def subject(
        self, settings: TrainingSettings, source: Path | StoredData | None, init: Path | None = None
    ) -> Subject:
        assert isinstance(source, Path)
        return image_subject(settings, source, init)

    def make_outputs(self, trained: Trained) -> Outputs:
        summary = trained.image_summary()
        return self.outputs(epoch_accuracies=trained.epoch_accuracies, summary=summary, **self.common_outputs(trained))


def image_subject(hp: TrainingSettings, folder: Path, init: Path | None = None) -> Subject:
    """Describe the training of the built-in image classifier on a prepared dataset, and verify the dataset first.

    Every byte of the dataset is read.

    Args:
        hp: the settings of the training.
        folder: the folder of the prepared dataset.
        init: the weights or the checkpoint to start from; None for a fresh start.

    Raises:
        DataError: the dataset is damaged.
        InputError: init cannot be read, or is a folder without complete weights.
        ReportedError: this pod's code is not what was registered.
    """
    check_code(IMAGE_CLASSIFIER.version)
    return make_subject(IMAGE_CLASSIFIER, hp, folder, init, prepared.verify(folder))


def check_classifier(known: ModelMetadata, path: str) -> None:
    """Refuse weights that are not those of a built-in image classifier. Raises InputError."""
    if known.recipe != IMAGE_CLASSIFIER.name:
        raise InputError(
            f"model_state must be of a built-in classifier, and {path} is of {known.recipe}: load it with "
            "flyte_ddp.load_model"
        )
