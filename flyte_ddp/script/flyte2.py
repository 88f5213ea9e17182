"""A script as a task of Flyte 2, in a file of the user's own.

training = ScriptTraining("train.py", arguments=["--epochs", "3"])
env = training.environment("gpt")

@env.task(**training.arguments())
async def train_gpt(options: RunOptions = RunOptions()) -> ScriptOutputs:
    return training.run(options)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyte.io import Dir, File

from flyte_ddp.flyte2.train import Data, Flyte2Training
from flyte_ddp.script.training import CommonScriptTraining


@dataclass(frozen=True)
class ScriptOutputs:
    """The outputs of a script, with the fields of flyte_ddp.script.task.ScriptOutputs."""

    checkpoint: Dir
    figures: dict[str, float]
    report: File
    logs: Dir


class ScriptTraining(CommonScriptTraining[Data, ScriptOutputs], Flyte2Training[ScriptOutputs]):  # type: ignore[misc]
    """A script that torchrun could run, as a task of Flyte 2."""

    outputs = ScriptOutputs

    def arguments(self, ignored: Sequence[str] = (), cache: Any = "disable", **own: Any) -> dict[str, Any]:
        """Return arguments of the task as a recipe's; cache as flyte_ddp.script.task.ScriptTraining.arguments."""
        return super().arguments(ignored, **own, **({} if cache is True else {"cache": cache}))
