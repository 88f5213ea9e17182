"""Overheads of a training: start-up, caching and memory, each compared with the minimum possible.

`python -m benchmarks.overheads --runs 5`. What is compared alternates, so that a machine that slows down for a while
affects everything alike; ratios are taken within each round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.engine import hardware, spread, train
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.recipes.hyperparameters import Hyperparameters

ROOT = Path(__file__).parents[1]
RUN = ["pyflyte", "run", "workflows/mnist.py", "pytorch_training_wf", "--hp", '{"epochs": 1, "dataset": "mnist"}']
EMPTY = ["pyflyte", "run", "benchmarks/empty.py", "empty_wf"]
REMEMBERED = ["pyflyte", "run", "benchmarks/remembered.py", "remembered_wf"]
IMPORT = "import torch, resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


class FirstStep(Exception):
    """Ends a training right after its first step."""


def seconds_to_first_step(data: Path) -> float:
    """Seconds from the launch of the ranks, in a fresh process, to the end of their first step."""
    started = time.perf_counter()

    def stop(event: Event) -> None:
        if isinstance(event, StepLogged):
            raise FirstStep

    try:
        train(Hyperparameters(log_interval=1), data, on_event=stop)
    except FirstStep:
        return time.perf_counter() - started
    raise AssertionError("training ended without a step")


def timed(command: list[str], environment: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    data = prepare("mnist")
    if arguments.first_step:
        print(seconds_to_first_step(data))
        return
    print(f"{hardware()}; n = {arguments.runs}\n")
    print("| what | seconds, median [range] | compared with | seconds | ratio, median [range] |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as home:
        # a home of its own, so that the user's cache is neither read nor written
        environment = {**os.environ, "HOME": home, "DDP_DATA_DIR": str(data.parents[1]), "DDP_RUNS_DIR": f"{home}/runs"}
        pyflyte, least = partial(timed, EMPTY, environment), partial(timed, REMEMBERED, environment)
        timed(RUN, environment)
        least()
        row("a cached `pyflyte run`", partial(timed, RUN, environment), "an empty one", pyflyte, arguments.runs)
        row("a cached one of a trivial task with a dataclass", least, "an empty one", pyflyte, arguments.runs)
        anew = [*RUN[:2], "--overwrite-cache", *RUN[2:]]
        row("a `pyflyte run` of one epoch", partial(timed, anew, environment), "an empty one", pyflyte, arguments.runs)
    first_step = [sys.executable, "-m", "benchmarks.overheads", "--first-step"]
    bare = [sys.executable, "-c", "import torch"]
    row(
        "from launch to first step",
        lambda: float(subprocess.run(first_step, cwd=ROOT, check=True, capture_output=True, text=True).stdout),
        "`import torch`",
        lambda: timed(bare, dict(os.environ)),
        arguments.runs,
    )
    kibibytes = int(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)
    peaks = [result.peak_bytes / 2**20 for result in train(Hyperparameters(epochs=1), data)]
    print(f"\nPeak memory of a rank: {max(peaks):.0f} MiB; of a bare `import torch`: {kibibytes / 1024:.0f} MiB")


def row(name: str, measured: Callable[[], float], other: str, least: Callable[[], float], runs: int) -> None:
    pairs = [(measured(), least()) for _ in range(runs)]
    ours, theirs = zip(*pairs, strict=True)
    ratios = spread([a / b for a, b in pairs])
    print(f"| {name} | {spread(ours)} | {other} | {statistics.median(theirs):.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
