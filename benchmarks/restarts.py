"""From a rank's SIGKILL to the next step: in the same pod, and, as if there were no restarts, in the next attempt's.

`python -m benchmarks.restarts --runs 3`: the commands of Flyte's pods on this machine, in turns. The next attempt
starts at once: what a cluster adds (finding room, pulling the image, downloading data) is not in it.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from flyteidl.core.literals_pb2 import Literal

from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from scripts.dry_run import build_package
from tests.pod import IMAGE, Pod, is_whole, literal, small_dataset

HP = Hyperparameters(epochs=1000, batch_size=50, learning_rate=0.02, precision="float32", log_interval=1)
AGAIN = "the ranks start again from the checkpoint"
WITHOUT_RESTARTS = """
from flyte_ddp.attempt import restarts
from flytekit.bin.entrypoint import execute_task_cmd

restarts.MOST = 0
execute_task_cmd()
"""


def seconds_to_next_step(task: Any, data: Literal, folder: Path, restarts: bool) -> float:
    options = RunOptions(nproc=2, checkpoint_seconds=1.0, tracking="off")
    inputs = {"hp": literal(HP), "data": data, "options": literal(options)}
    first = Pod(task, inputs, folder / "first")
    if not restarts:
        first.command = [sys.executable, "-c", WITHOUT_RESTARTS, *first.command[1:]]
    with first.running() as process:
        first.wait_until(lambda: is_whole(first.checkpoints / "checkpoint") and "Train Epoch" in first.log, process)
        os.kill(a_rank_of(process.pid), signal.SIGKILL)
        killed = time.monotonic()
        if restarts:
            first.wait_until(lambda: "Train Epoch" in first.log.partition(AGAIN)[2], process)
            return time.monotonic() - killed
        process.wait()
    second = Pod(task, inputs, folder / "second", previous=first)
    with second.running() as process:
        second.wait_until(lambda: "Train Epoch" in second.log, process)
        return time.monotonic() - killed


def a_rank_of(session: int) -> int:
    """The last process of the pod that leads a process group of its own."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        pid = int(place.name)
        with suppress(ProcessLookupError):
            if pid != session and os.getsid(pid) == session and os.getpgid(pid) == pid:
                found.append(pid)
    return max(found)


def summary(values: list[float]) -> str:
    return f"{median(values):.1f} [{min(values):.1f}-{max(values):.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each")
    runs = parser.parse_args().runs
    task = build_package(IMAGE, environment={"DDP_PROFILE": "sandbox"}).tasks["workflows.mnist.pytorch_mnist_task"]
    again: list[float] = []
    afresh: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        data = small_dataset(Path(place, "data"))
        for run in range(runs):
            again.append(seconds_to_next_step(task, data, Path(place, f"again-{run}"), restarts=True))
            afresh.append(seconds_to_next_step(task, data, Path(place, f"afresh-{run}"), restarts=False))
            print(f"same pod {again[-1]:.1f} s, next attempt {afresh[-1]:.1f} s", file=sys.stderr, flush=True)
    ratios = [new / same for same, new in zip(again, afresh, strict=True)]
    print("| seconds from SIGKILL to the next step | median [range] |\n|---|---|")
    print(f"| in the same pod | {summary(again)} |\n| in the next attempt's | {summary(afresh)} |")
    print(f"\nnext attempt / same pod: {summary(ratios)}, n = {runs}")


if __name__ == "__main__":
    main()
