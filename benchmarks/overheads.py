"""Overheads of a training: start-up and memory, each compared with the minimum possible.

`python -m benchmarks.overheads --runs 5`. What is compared alternates, so that a machine that slows down for a while
affects everything alike; ratios are taken within each round.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.engine import hardware, spread, train
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.recipes.hyperparameters import Hyperparameters

ROOT = Path(__file__).parents[1]
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


def printed(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def timed(command: list[str]) -> float:
    started = time.perf_counter()
    printed(command)
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
    first_step = [sys.executable, "-m", "benchmarks.overheads", "--first-step"]
    bare = [sys.executable, "-c", "import torch"]
    pairs = [(float(printed(first_step)), timed(bare)) for _ in range(arguments.runs)]
    ours, theirs = zip(*pairs, strict=True)
    ratios = spread([one / other for one, other in pairs])
    print(f"Seconds from launch to first step: {spread(ours)}; of `import torch`: {spread(theirs)}; ratio: {ratios}")
    kibibytes = int(printed([sys.executable, "-c", IMPORT]))
    peaks = [result.peak_bytes / 2**20 for result in train(Hyperparameters(epochs=1), data)]
    print(f"\nPeak memory of a rank: {max(peaks):.0f} MiB; of a bare `import torch`: {kibibytes / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
