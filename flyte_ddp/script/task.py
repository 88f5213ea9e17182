"""A script as a Flyte task, in a workflow file of the user's own.

training = ScriptTraining("train.py", arguments=["--epochs", "3"])

@task(**training.arguments())
def train_gpt(options: RunOptions) -> ScriptOutputs:
    return training.run(options)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.flyte1.recipe import NamedTraining
from flyte_ddp.flyte1.train import Data
from flyte_ddp.script.training import CommonScriptTraining


class ScriptOutputs(NamedTuple):
    """The outputs of a script.

    Attributes:
        checkpoint: the folder that the script had as $DDP_CHECKPOINT_DIR, as the script left it.
        figures: the newest value of each figure in $DDP_EVENTS.
        report: an HTML page in one file.
        logs: a folder with what each rank printed, $DDP_EVENTS as events.jsonl, and what trackers wrote.
    """

    checkpoint: FlyteDirectory
    figures: dict[str, float]
    report: FlyteFile["html"]  # noqa: F821
    logs: FlyteDirectory


class ScriptTraining(CommonScriptTraining[Data, ScriptOutputs], NamedTraining[ScriptOutputs]):  # type: ignore[misc]
    """A script that torchrun could run, as a task of Flyte 1."""

    outputs = ScriptOutputs

    def arguments(self, ignored_inputs: Sequence[str] = (), cache: Any = False, **own: Any) -> dict[str, Any]:
        """Return the keyword arguments of the @task that runs the script: cache, retries, live report, resources.

        The values come from the registered settings.

        Args:
            ignored_inputs: names of the task's inputs that the cache ignores.
            cache: False caches nothing, because a script may read what no cache key covers. True reuses the outputs for
                the same inputs, code and arguments of the script, whatever else the script reads. Any other value is
                given to @task as its cache.
            own: your own arguments of @task. A quantity that you leave out of requests= and limits= is the registered
                one. environment=, secret_requests=, labels= and annotations= are added to the registered ones. All
                other arguments, such as retries=, replace the registered ones.
        """
        return super().arguments(ignored_inputs, **own, **({} if cache is True else {"cache": cache}))
