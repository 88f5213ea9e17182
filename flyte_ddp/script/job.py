"""The messages between the parent of a script's ranks and these ranks. Standard library only."""

from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.fields import Settings, setting

RANKS = "flyte_ddp.script.rank"  # the module whose function run each rank calls


@dataclass(frozen=True)
class ScriptSettings(Settings):
    """The facts that determine the result of a script, as reports and trackers show them."""

    # What other trainings have as settings, and a script tells nobody
    backend, stop_after, last_epoch = "auto", 0, 1

    script: str = setting("", help="the script's path, relative to the folder in which it was found.")
    arguments: str = setting("", help="its arguments, as they are typed in a shell.")


@dataclass(frozen=True, kw_only=True)
class ScriptJob(Job):
    """A run of a script, as its ranks need to know it.

    Attributes:
        settings: ScriptSettings.
        script: the script's absolute path.
        arguments: the script's arguments.
        working_folder: the folder in which the script runs.
        checkpoint_folder: the folder that the script gets as $DDP_CHECKPOINT_DIR.
        events: the file that rank 0 gets as $DDP_EVENTS.
        ended: a folder in which each rank leaves a file named by its number if its script has come to its own end.
        port: the port at which rank 0 meets the others. It has no effect on many nodes.
        restarts: how often the ranks were started before in this attempt.
        first_step: the newest step that was told of before the checkpoint from which the script goes on.
    """

    settings: Any
    script: str
    arguments: tuple[str, ...]
    working_folder: str
    checkpoint_folder: str
    events: str
    ended: str
    port: int
    restarts: int = 0
    first_step: int = 0


@dataclass(frozen=True)
class ScriptResult(TrainingResult):
    """The result of a script's rank.

    Attributes:
        figures: the newest value of each figure that the script has told, also in earlier attempts. The parent sets it.
    """

    figures: dict[str, float] = field(default_factory=dict)
