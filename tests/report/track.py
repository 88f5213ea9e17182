"""A process that tells a tracker of a recorded training, and what the tracker has of it afterwards.

python -m tests.report.track RECORDED LOGS OPTIONS END; END: closed, or killed once the tracker has heard of all.
WAIT_SECONDS in its environment is how long a server is waited for that may never answer.
"""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flyte_ddp.report import mlflow_run, wandb_run
from flyte_ddp.report.console import show_output
from flyte_ddp.report.mlflow_run import TRAINING
from flyte_ddp.report.tracking import CLOSE_SECONDS, TRACKERS, Tracking, open_tracker
from flyte_ddp.settings import RunOptions

if TYPE_CHECKING:
    from tests.report.wandb_file import Logged

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = CLOSE_SECONDS + 60  # less than a silent server holds whoever waits for its answer
Points = dict[str, list[tuple[int, float]]]  # step and value by name, in the order of the steps


class Told(NamedTuple):
    urls: Any
    said: str  # standard error
    logs: Path

    @property
    def run(self) -> "Logged":
        from tests.report.wandb_file import Logged  # it imports wandb, which the tracker imports by itself

        (file,) = self.logs.glob("wandb/*run-*/*.wandb")
        return Logged(file)


def tell_tracker(
    recorded: tuple[Any, ...], folder: Path, options: dict[str, Any], end: str = "closed", **environment: str
) -> Told:
    """What a tracker in a process of its own makes of a recorded training; its logs are put into the folder."""
    (folder / "recorded.pickle").write_bytes(pickle.dumps(tuple(recorded)))
    arguments = [str(folder / "recorded.pickle"), str(folder / "tracked"), json.dumps(options), end]
    command, variables = [sys.executable, "-m", "tests.report.track", *arguments], {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    mlflow_run.SEND_SECONDS = 0.0
    if end == "killed":
        assert done.returncode == -signal.SIGKILL, done.stderr
        return Told([], done.stderr, folder / "tracked")
    assert done.returncode == 0, done.stderr
    return Told(json.loads(done.stdout), done.stderr, folder / "tracked")  # its output is the addresses alone


def in_tensorboard(logs: Path, run: str = "*") -> Points:
    values = tensorboard_values(logs, "scalars", run)
    return {name: [(step, value.item()) for step, value in points] for name, points in values.items() if points}


def tensorboard_values(logs: Path, plugin: str, run: str = "*") -> dict[str, list[tuple[int, Any]]]:
    """Step and value by name of what one of TensorBoard's pages shows: scalars, text, images, histograms."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    (folder,) = (logs / "tensorboard").glob(run)
    read = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {
        name: [(one.step, make_ndarray(one.tensor_proto)) for one in read.Tensors(name)]
        for name in read.PluginTagToContent(plugin)
    }


def in_wandb(history: list[dict[str, Any]]) -> Points:
    points: Points = {}
    for row in history:
        for name, value in row.items():
            axis = f"steps/{name.partition('/')[0]}"
            if axis in row and isinstance(value, (int, float)):
                points.setdefault(name, []).append((row[axis], value))
    return points


def in_mlflow(address: str, training: str) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(address)
    (run,) = client.search_runs(["1"], f"tags.`{TRAINING}` = '{training}'")
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def main() -> None:
    recorded, logs, options, end = sys.argv[1:]
    show_output()
    setting, events = pickle.loads(Path(recorded).read_bytes())
    Path(logs).mkdir(exist_ok=True)
    setting = dataclasses.replace(setting, logs=Path(logs), options=RunOptions.from_json(options))
    urls: list[str] = []
    if "WAIT_SECONDS" in os.environ:
        wait = float(os.environ["WAIT_SECONDS"])
        wandb_run.PROBE_SECONDS, wandb_run.FINISH_SECONDS = (wandb_run.PROBE_SECONDS[0], wait), wait
    mlflow_run.SEND_SECONDS = 0.0
    if end == "killed":
        tracking = Tracking(setting, TRACKERS[setting.options.tracking](setting, urls.append), Path(logs).parent)
        for event in events:
            tracking(event)
        os.kill(os.getpid(), signal.SIGKILL)
    tracker = open_tracker(setting, Path(logs).parent, urls.append)
    if tracker:
        for event in events:
            tracker(event)
        tracker.close()
    print(json.dumps(urls))


if __name__ == "__main__":
    main()
