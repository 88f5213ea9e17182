"""Training within a task of Flyte 2, from typed inputs to typed outputs; and that of the built-in image classifiers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import flyte
from flyte.io import Dir, File

from flyte_ddp.attempt.pod import check_code
from flyte_ddp.attempt.summaries import TrainingSummary
from flyte_ddp.attempt.training import IMAGE_CLASSIFIER, Trained, image_subject, train
from flyte_ddp.engine.job import Subject, subject_of
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.attempt import one_attempt
from flyte_ddp.flyte2.data import downloaded, output_file, output_folder
from flyte_ddp.flyte2.environment import training_arguments, training_environment
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.user_code import UserCode

Data: TypeAlias = File | Dir | None
Outputs = TypeVar("Outputs")


class Training(Generic[Outputs]):
    """Trains within a task, which returns Outputs.

    The task is an async function, although it awaits nothing, so that it runs in the pod's main thread: that one alone
    hears that the pod is asked to stop, and has a checkpoint written.
    """

    def __init__(self, code: UserCode, observers: Sequence[UserCode] = ()):
        self.code, self.observers = code, observers

    def environment(self, name: str, kind: type[flyte.TaskEnvironment] = flyte.TaskEnvironment, **more: Any) -> Any:
        """The environment of the task; kind, more: another kind, with the arguments that only it has."""
        files = {file for code in (self.code, *self.observers) for file in code.files}
        return training_environment(name, self.code.version, sorted(files), kind, **more)

    def arguments(self, ignored: Sequence[str] = ("options",)) -> dict[str, Any]:
        """Arguments of the task: cache, retries, live report, time limit."""
        return training_arguments(f"{self.code.name} {self.code.version}", ignored)

    def run(
        self, settings: TrainingSettings, options: RunOptions, data: Data = None, init: File | None = None
    ) -> Outputs:
        """Trains with one process per rank, on the file or folder data, if the recipe uses one.

        init: what to start from: the model_state of an earlier training, or a checkpoint (final-checkpoint in its logs,
        if options.keep_checkpoint was set), from which training continues up to settings.epochs in total. Raises what
        launcher.launch raises.
        """

        def fetch() -> Subject:
            return self.subject(settings, downloaded(data), downloaded(init))

        with one_attempt():
            return self.outputs_of(train(platform, settings, options, fetch, self.code.root, self.observers))

    def subject(self, settings: TrainingSettings, source: Path | None, init: Path | None = None) -> Subject:
        """What is trained, and its data; ReportedError if this pod's code is not what was registered."""
        check_code(self.code.version)
        return subject_of(self.code, settings, source, init)

    def outputs_of(self, trained: Trained) -> Outputs:
        raise NotImplementedError


def files_of(trained: Trained) -> dict[str, Any]:
    """The outputs that all trainings have."""
    return {
        "model_state": output_file(trained.model),
        "report": output_file(trained.report),
        "logs": output_folder(trained.logs, trained.logs_url),
    }


@dataclass(frozen=True)
class TrainingOutputs:
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
    model_state: File
    summary: TrainingSummary
    report: File
    logs: Dir


class ImageTraining(Training[TrainingOutputs]):
    """Trains an image classifier on a prepared dataset."""

    def subject(self, settings: TrainingSettings, source: Path | None, init: Path | None = None) -> Subject:
        assert source
        return image_subject(settings, source, init)

    def outputs_of(self, trained: Trained) -> TrainingOutputs:
        accuracies = [measures["accuracy"] for measures in trained.epoch_measures]
        return TrainingOutputs(accuracies, summary=trained.image_summary(), **files_of(trained))


image_training = ImageTraining(IMAGE_CLASSIFIER)
