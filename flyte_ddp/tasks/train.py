"""Training an image classifier within a Flyte task: from typed inputs to typed outputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Cache
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt import training
from flyte_ddp.attempt.summaries import TrainingSummary
from flyte_ddp.attempt.training import IMAGE_CLASSIFIER, Trained, image_subject
from flyte_ddp.engine.job import Subject
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.tasks import platform
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.outputs import output_file, output_folder
from flyte_ddp.tasks.resources import training_resources

TRAINING_CODE = CodeVersion(IMAGE_CLASSIFIER.version)


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


def train(
    hp: Hyperparameters, data: FlyteDirectory, options: RunOptions, init: FlyteFile | None = None
) -> TrainingOutputs:
    """Trains hp.model on a prepared dataset with one process per rank; raises what launcher.launch raises.

    init: a model_state or checkpoint to start from.
    """

    def fetch() -> Subject:
        return image_subject(hp, Path(data.download()), None if init is None else Path(init.download()))

    return outputs_of(training.train(platform, hp, options, fetch))


def outputs_of(trained: Trained) -> TrainingOutputs:
    accuracies = [measures["accuracy"] for measures in trained.epoch_measures]
    return TrainingOutputs(accuracies, *files_of(trained, trained.image_summary()))


def files_of(trained: Trained, summary: Any) -> tuple[PythonPickledFile, Any, FlyteFile, FlyteDirectory]:
    """The outputs that all trainings have, in their order: model_state, summary, report, logs."""
    model = output_file(trained.model, PythonPickledFile)
    return model, summary, output_file(trained.report), output_folder(trained.logs, trained.logs_url)
