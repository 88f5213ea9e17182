"""Measures what spinning threads cost beside other programs: `python -m benchmarks.spinning --runs 5`.

One rank with a thread per core trains one epoch of digits, with GNU OpenMP's own number of turns and with
launcher.SPIN_COUNT, on a machine that does nothing else, and beside as many busy processes as it has cores. The four
take turns.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.engine import hardware, spread, train
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.launch.environment import available_cores
from flyte_ddp.launch.launcher import SPIN_COUNT
from flyte_ddp.recipes.hyperparameters import Hyperparameters

GNU = "300000"  # its default where there is a core for each thread, see libgomp's manual on GOMP_SPINCOUNT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="one training in this process, as the others are started")
    arguments = parser.parse_args()
    if arguments.one:
        hp = Hyperparameters(dataset="digits", epochs=1)
        print(train(hp, prepare("digits"), 1)[0].epochs[0].train_seconds)
        return
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(arguments.runs):
        for busy in (0, available_cores()):
            for turns in (GNU, SPIN_COUNT):
                with busy_processes(busy):
                    found.setdefault((busy, turns), []).append(seconds(turns))
    print(f"{hardware()}; n = {arguments.runs}\n")
    print("| busy processes | turns | training seconds, median [range] |")
    print("|---|---|---|")
    for (busy, turns), times in found.items():
        print(f"| {busy} | {int(turns):,} | {spread(times)} |")


def seconds(turns: str) -> float:
    """Of a training in a process of its own, because threads read the variable when they are first needed."""
    command = [sys.executable, "-m", "benchmarks.spinning", "--one"]
    environment = {**os.environ, "GOMP_SPINCOUNT": turns}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


@contextmanager
def busy_processes(number: int, core: int | None = None) -> Iterator[None]:
    """While the block runs, so many processes compute; on this core, if given."""
    processes = [multiprocessing.Process(target=turn, daemon=True) for _ in range(number)]
    try:
        for process in processes:
            process.start()
            if core is not None:
                os.sched_setaffinity(process.pid or 0, {core})
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def turn() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
