"""Training within a Flyte task, from typed inputs to typed outputs; and that of the built-in image classifiers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from flytekit import Cache
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.pod import check_code
from flyte_ddp.attempt.registration import registration
from flyte_ddp.attempt.summaries import TrainingSummary
from flyte_ddp.attempt.training import IMAGE_CLASSIFIER, Trained, image_subject, train
from flyte_ddp.engine.job import Subject, subject_of
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.tasks import platform
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.data import downloaded
from flyte_ddp.tasks.outputs import output_file, output_folder
from flyte_ddp.tasks.resources import training_resources
from flyte_ddp.user_code import UserCode

TRAINING_CODE = CodeVersion(IMAGE_CLASSIFIER.version)
Data: TypeAlias = FlyteFile | FlyteDirectory | None
Outputs = TypeVar("Outputs")


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


class Training(Generic[Outputs]):
    """Trains within a task, which returns Outputs."""

    def __init__(self, code: UserCode, observers: Sequence[UserCode] = ()):
        self.code, self.observers = code, observers

    def run(
        self, settings: TrainingSettings, options: RunOptions, data: Data = None, init: FlyteFile | None = None
    ) -> Outputs:
        """Trains with one process per rank, on the file or folder data, if the recipe uses one.

        init: what to start from: the model_state of an earlier training, or a checkpoint (final-checkpoint in its logs,
        if options.keep_checkpoint was set), from which training continues up to settings.epochs in total. Raises what
        launcher.launch raises.
        """

        def fetch() -> Subject:
            return self.subject(settings, downloaded(data), downloaded(init))

        return self.outputs_of(train(platform, settings, options, fetch, self.code.root, self.observers))

    def run_as_rank(
        self, settings: TrainingSettings, options: RunOptions, data: Data = None, init: FlyteFile | None = None
    ) -> Outputs:
        """Trains as one rank of many nodes, in a task whose arguments come from multinode; outputs on rank 0 only."""
        from flyte_ddp.attempt.multinode import train_as_rank  # they import torch
        from flyte_ddp.tasks.multinode import downloaded_once, picklable

        def fetch() -> Subject:
            return self.subject(settings, downloaded_once(data), downloaded_once(init))

        asked = registration()
        nodes = asked.node_range, asked.ranks_per_node
        trained = train_as_rank(platform, settings, options, fetch, *nodes, self.observers)
        return picklable(self.outputs_of(trained) if trained else None)

    def subject(self, settings: TrainingSettings, source: Path | None, init: Path | None = None) -> Subject:
        """What is trained, and its data; ReportedError if this pod's code is not what was registered."""
        check_code(self.code.version)
        return subject_of(self.code, settings, source, init)

    def outputs_of(self, trained: Trained) -> Outputs:
        raise NotImplementedError


def files_of(trained: Trained, summary: Any) -> tuple[PythonPickledFile, Any, FlyteFile, FlyteDirectory]:
    """The outputs that all trainings have, in their order: model_state, summary, report, logs."""
    model = output_file(trained.model, PythonPickledFile)
    return model, summary, output_file(trained.report), output_folder(trained.logs, trained.logs_url)


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


class ImageTraining(Training[TrainingOutputs]):
    """Trains an image classifier on a prepared dataset."""

    def subject(self, settings: TrainingSettings, source: Path | None, init: Path | None = None) -> Subject:
        assert source
        return image_subject(settings, source, init)

    def outputs_of(self, trained: Trained) -> TrainingOutputs:
        accuracies = [measures["accuracy"] for measures in trained.epoch_measures]
        return TrainingOutputs(accuracies, *files_of(trained, trained.image_summary()))


image_training = ImageTraining(IMAGE_CLASSIFIER)
