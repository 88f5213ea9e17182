"""Training within a task of Flyte 2: from typed inputs to ranks and back to typed outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flyte.errors import NonRecoverableError
from flyte.io import Dir, File

from flyte_ddp.attempt.failures import failure_of
from flyte_ddp.attempt.summaries import TrainingSummary
from flyte_ddp.attempt.training import Trained, image_subject, train
from flyte_ddp.engine.job import Subject
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.data import downloaded, output_file, output_folder
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions


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


def train_classifier(hp: Hyperparameters, data: Dir, options: RunOptions, init: File | None = None) -> TrainingOutputs:
    """Trains hp.model on a prepared dataset with one process per rank; raises what launcher.launch raises.

    init: a model_state or checkpoint to start from.
    """

    def fetch() -> Subject:
        return image_subject(hp, downloaded(data), None if init is None else downloaded(init))

    with one_attempt():
        return outputs_of(train(platform, hp, options, fetch))


def outputs_of(trained: Trained) -> TrainingOutputs:
    return TrainingOutputs(
        epoch_accuracies=[measures["accuracy"] for measures in trained.epoch_measures],
        model_state=output_file(trained.model),
        summary=trained.image_summary(),
        report=output_file(trained.report),
        logs=output_folder(trained.logs, trained.logs_url),
    )


@contextmanager
def one_attempt() -> Iterator[None]:
    """In a local run, makes every failure final: the SDK would try again after a pause, and nobody has asked for it."""
    try:
        yield
    except Exception as error:
        if platform.is_local():
            raise NonRecoverableError(str(failure_of(platform, error))) from None
        raise
