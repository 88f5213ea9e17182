"""Training within a Flyte task, from typed inputs to typed outputs, and that of the built-in image classifiers."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from flytekit import Cache
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.platform_training import IMAGE_CLASSIFIER, ClassifierTraining, Training
from flyte_ddp.attempt.registration import registration
from flyte_ddp.attempt.summaries import TrainingSummary
from flyte_ddp.data.description import StoredData
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.caching import CodeVersion
from flyte_ddp.flyte1.data import downloaded, downloaded_once
from flyte_ddp.flyte1.outputs import output_file, output_folder
from flyte_ddp.flyte1.resources import training_resources, with_template
from flyte_ddp.settings import RunOptions, TrainingSettings

TRAINING_CODE = CodeVersion(IMAGE_CLASSIFIER.version)
Data: TypeAlias = FlyteFile | FlyteDirectory | None
Outputs = TypeVar("Outputs")


def training_arguments(
    code: CodeVersion = TRAINING_CODE,
    salt: str = "",
    ignored_inputs: Sequence[str] = ("options",),
    **own: Any,
) -> dict[str, Any]:
    """Return the keyword arguments of a @task that trains: cache, retries, live report (Deck), and those of its pod.

    The pod's are image, resources, environment, secrets, time limit, the grace after a SIGTERM, and the hosts to avoid.
    They come from the registered settings.

    Args:
        code: the version of the code that decides the result. It is a part of the cache key, and the pod checks it.
        salt: more text that is a part of the cache key, such as a recipe's name.
        ignored_inputs: names of the task's inputs that the cache ignores.
        own: arguments of training_resources() or @task. environment, secret_requests, labels and annotations are added
            to the registered ones. requests and limits replace single quantities. most_gpus limits the number of GPUs.
            Any other argument, even cache or retries, replaces the computed one.

    Raises:
        InputError: A DDP_ environment variable is invalid; a registered secret is not named GROUP/KEY; or avoid_hosts
            is registered, and the pod's template is one in the cluster.
    """
    arguments = {
        "cache": Cache(policies=code, salt=salt, ignored_inputs=tuple(ignored_inputs), serialize=True),
        "retries": registration().retries,
        "enable_deck": True,
        "deck_fields": (),  # the live report is the only Deck
        **training_resources(code, **own),
    }
    return with_template(arguments)


class FlytekitTraining(Training[Data, Outputs]):
    """A training within a task of flytekit, on one node or many."""

    platform = platform
    downloaded = staticmethod(downloaded)
    downloaded_once = staticmethod(downloaded_once)
    output_file = staticmethod(output_file)
    output_folder = staticmethod(output_folder)
    output_model = staticmethod(partial(output_file, kind=PythonPickledFile))

    def run_as_rank(
        self, settings: TrainingSettings, options: RunOptions, data: Data | StoredData = None, init: Data = None
    ) -> Outputs:  # as its base says, in a task whose arguments come from multinode
        outputs: Any = super().run_as_rank(settings, options, data, init)
        if not hasattr(outputs, "model_state"):  # a script's, or None
            return outputs
        # Flyte's plugin pickles the outputs. PythonPickledFile cannot be pickled: flytekit creates the class on use
        return outputs._replace(model_state=FlyteFile(outputs.model_state.path))


class TrainingOutputs(NamedTuple):
    """The outputs of an image classifier's training.

    Attributes:
        epoch_accuracies: accuracy after each evaluation, from 0 to 1, on the validation split, if any, else on the test
            split.
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


class ImageTraining(ClassifierTraining[Data, TrainingOutputs], FlytekitTraining[TrainingOutputs]):
    """A training of an image classifier on a prepared dataset."""

    outputs = TrainingOutputs


image_training = ImageTraining()
