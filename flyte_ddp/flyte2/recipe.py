"""A user's recipe as a task of Flyte 2, in a file of their own:

training = RecipeTraining("my_project.model:CharLM")
env = training.environment("my_project")

@env.task(**training.arguments())
async def train_model(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return training.run(settings, options)

The function is async so that it runs in the pod's main thread, which alone hears that the pod is asked to stop, and has
a checkpoint written; it awaits nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import flyte
from flyte.io import Dir, File

from flyte_ddp.attempt.pod import check_code
from flyte_ddp.attempt.summaries import RecipeSummary
from flyte_ddp.attempt.training import Trained, train
from flyte_ddp.engine.job import Subject, subject_of
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.data import downloaded, output_file, output_folder
from flyte_ddp.flyte2.environment import training_arguments, training_environment
from flyte_ddp.flyte2.inputs import set_up_flyte
from flyte_ddp.flyte2.training import one_attempt
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.user_code import find_code

Data: TypeAlias = File | Dir | None


@dataclass(frozen=True)
class RecipeOutputs:
    """The outputs of a recipe's training.

    Attributes:
        epoch_measures: after each epoch, by name; of the validation samples if there are any, else of the test samples.
        model_state: the trained weights, a CPU state_dict, from which the recipe's load_model rebuilds the network.
            With a validation split they are those of the best epoch, and logs has those of the last one as last.pt.
        summary: the figures.
        report: an HTML page in one file.
        logs: a folder with the recipe's predictions on the test samples, and what ranks, trackers and profiler wrote.
    """

    epoch_measures: list[dict[str, float]]
    model_state: File
    summary: RecipeSummary
    report: File
    logs: Dir


class RecipeTraining:
    """A recipe, known only by its name: its module, which imports torch, is for the ranks.

    Its first-party code and data files are shipped to the pods with the workflow's, and determine the cache version.
    """

    def __init__(self, recipe: str, data_files: Sequence[str] = (), observers: Sequence[str] = ()):
        """recipe: "package.module:Name". data_files: files that it reads, relative to its module's file. observers:
        classes, named likewise, with a method for each event that concerns them; no part of the cache version.

        Create it at the top level of the file with the task, after the imports. Raises InputError if there is no such
        recipe.
        """
        set_up_flyte()
        self.code = find_code(recipe, data_files)
        self.observers = [find_code(one) for one in observers]

    def environment(self, name: str, **more: Any) -> flyte.TaskEnvironment:
        """The environment of the task that trains or predicts; more: of a flyte.clustered.ClusteredTaskEnvironment."""
        files = {file for code in (self.code, *self.observers) for file in code.files}
        return training_environment(name, self.code.version, sorted(files), **more)

    def arguments(self, ignored: Sequence[str] = ("options",)) -> dict[str, Any]:
        """Arguments of the task that trains or predicts: cache, retries, live report, time limit."""
        return training_arguments(f"{self.code.name} {self.code.version}", ignored)

    def run(
        self, settings: TrainingSettings, options: RunOptions, data: Data = None, init: File | None = None
    ) -> RecipeOutputs:
        """Trains with one process per rank, on the file or folder data, if the recipe uses one.

        init: what to start from: the model_state of an earlier training, or a checkpoint (final-checkpoint in its logs,
        if options.keep_checkpoint was set), from which training continues up to settings.epochs in total. Raises what
        launcher.launch raises.
        """

        def fetch() -> Subject:
            source = None if data is None else downloaded(data)
            return self.subject(settings, source, None if init is None else downloaded(init))

        with one_attempt():
            return outputs_of(train(platform, settings, options, fetch, self.code.root, self.observers))

    def subject(self, settings: TrainingSettings, source: Path | None, init: Path | None = None) -> Subject:
        """The recipe and its data; ReportedError if this pod's code is not what was registered."""
        check_code(self.code.version)
        return subject_of(self.code, settings, source, init)


def outputs_of(trained: Trained) -> RecipeOutputs:
    return RecipeOutputs(
        epoch_measures=trained.epoch_measures,
        model_state=output_file(trained.model),
        summary=trained.recipe_summary(),
        report=output_file(trained.report),
        logs=output_folder(trained.logs, trained.logs_url),
    )
