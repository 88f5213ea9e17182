"""Opens the tracker that a run's options ask for."""

import os
from collections.abc import Callable
from importlib.util import find_spec

from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.report import wandb_run
from flyte_ddp.report.background import Background
from flyte_ddp.report.console import say
from flyte_ddp.report.record import RunInfo
from flyte_ddp.report.tensorboard import TensorBoard
from flyte_ddp.report.wandb_compat import kill_service
from flyte_ddp.report.wandb_run import WandbRun

CLOSE_SECONDS = 30.0  # how long the end of a run waits for its tracker


def open_tracker(info: RunInfo, on_url: Callable[[str], None]) -> Background | None:
    """The tracker, already running in a thread of its own, or None."""
    wish = choose_tracking(info.options.tracking)
    if wish == "tensorboard":
        return Background("TensorBoard", lambda: TensorBoard(info), CLOSE_SECONDS)
    if wish in ("online", "offline"):
        return Background("Weights & Biases", lambda: WandbRun(info, wish, on_url), CLOSE_SECONDS, abandon=kill_service)
    return None


def choose_tracking(wish: str) -> str:
    """online, offline, tensorboard or off: auto is online if W&B has a key, else off with a line that says so.

    Raises InputError if TensorBoard is not installed.
    """
    if wish == "tensorboard" and find_spec("tensorboard") is None:
        raise InputError(f"tracking tensorboard needs {not_installed('tensorboard', 'tensorboard')}")
    if wish != "auto":
        return wish
    if wandb_run.has_key():
        return {"offline": "offline", "disabled": "off"}.get(os.environ.get("WANDB_MODE", ""), "online")
    say('Tracking is off: set WANDB_API_KEY for Weights & Biases, or try --options \'{"tracking": "tensorboard"}\'')
    return "off"
