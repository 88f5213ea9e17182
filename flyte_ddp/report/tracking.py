"""Opens the tracker that a run's options ask for."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.report import wandb_run
from flyte_ddp.report.background import Background
from flyte_ddp.report.console import say
from flyte_ddp.report.mlflow_run import ADDRESS, FilesOfModel, MlflowRun
from flyte_ddp.report.record import RunInfo
from flyte_ddp.report.tensorboard import TensorBoard
from flyte_ddp.report.wandb_compat import kill_service
from flyte_ddp.report.wandb_run import WandbRun

CLOSE_SECONDS = 30.0  # how long the end of a run waits for its tracker


def open_tracker(info: RunInfo, folder: Path, on_url: Callable[[str], None]) -> Background | None:
    """The tracker, already running in a thread of its own, or None.

    folder: with the report and the model. on_url: called with the run's URL once it is known.
    """
    wish = choose_tracking(info.options.tracking)
    if wish == "tensorboard":
        return Background("TensorBoard", lambda: TensorBoard(info), CLOSE_SECONDS)
    if wish == "mlflow":
        address = os.environ[ADDRESS]
        return Background("MLflow", lambda: MlflowRun(info, address, folder, on_url), CLOSE_SECONDS)
    if wish in ("online", "offline"):
        return Background("Weights & Biases", lambda: WandbRun(info, wish, on_url), CLOSE_SECONDS, abandon=kill_service)
    return None


def add_to_run(weights: Path, *files: Path) -> None:
    """Adds the files to the MLflow run of the training of these weights, if there is one; says what fails."""
    address = os.environ.get(ADDRESS)
    if address and find_spec("mlflow"):
        Background("MLflow", lambda: FilesOfModel(address, weights, *files), CLOSE_SECONDS).close()


def choose_tracking(wish: str) -> str:
    """online, offline, tensorboard, mlflow or off: auto is online if W&B has a key, else off with a line that says so.

    Raises InputError if what is wished for is not installed, or has no address.
    """
    if wish == "tensorboard" and find_spec("tensorboard") is None:
        raise InputError(f"tracking tensorboard needs {not_installed('tensorboard', 'tensorboard')}")
    if wish == "mlflow" and find_spec("mlflow") is None:
        raise InputError(f"tracking mlflow needs {not_installed('mlflow-skinny', 'mlflow')}")
    if wish == "mlflow" and not os.environ.get(ADDRESS):
        raise InputError(f"tracking mlflow needs a server: set {ADDRESS}, such as to http://mlflow.example.org:5000")
    if wish != "auto":
        return wish
    if wandb_run.has_key():
        return {"offline": "offline", "disabled": "off"}.get(os.environ.get("WANDB_MODE", ""), "online")
    say("Tracking is off: set WANDB_API_KEY for Weights & Biases, or the option tracking, such as to tensorboard")
    return "off"
