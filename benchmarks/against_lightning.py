"""Compares the time to train MNIST with that of Lightning, same recipe: `python -m benchmarks.against_lightning`.

One epoch on one rank per GPU, or on two ranks without GPUs. Each training is a process of its own, the two alternate,
and each pair has its own seed. Training seconds are those of the loop alone, without evaluation; the total is the whole
process.
"""

import argparse
import json
import subprocess
import sys
import time

from benchmarks.engine import hardware, spread, train
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters

MODULES = {"Lightning": "benchmarks.lightning_mnist", "ours": "benchmarks.against_lightning"}


def measure(name: str, seed: int) -> dict[str, float]:
    """One training in a new process: seconds of its loop, total seconds, accuracy."""
    started = time.perf_counter()
    command = [sys.executable, "-m", MODULES[name], "--seed", str(seed)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return {"all": time.perf_counter() - started, **json.loads(result.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # one training of ours
    arguments = parser.parse_args()
    data = prepare("mnist")
    if arguments.seed is not None:
        epoch = train(Hyperparameters(epochs=1, seed=arguments.seed), data)[0].epochs[-1]
        print(json.dumps({"seconds": epoch.train_seconds, "accuracy": epoch.test["accuracy"]}))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in MODULES}
    for seed in range(1, arguments.runs + 1):
        for name in MODULES:
            runs[name].append(measure(name, seed))
    world = choose_world("auto", 0, Hyperparameters().batch_size)
    print(f"{hardware()}; n = {arguments.runs}, {world.size} ranks, {world.backend}\n")
    print("| | training seconds, median [range] | total seconds | test accuracy, % |")
    print("|---|---|---|---|")
    for name, measured in runs.items():
        accuracies = spread([100 * run["accuracy"] for run in measured])
        seconds, whole = (spread([run[what] for run in measured]) for what in ("seconds", "all"))
        print(f"| {name} | {seconds} | {whole} | {accuracies} |")
    for what, key in (("training seconds", "seconds"), ("total seconds", "all")):
        ratios = [theirs[key] / ours[key] for theirs, ours in zip(*runs.values(), strict=True)]
        print(f"\nLightning / ours, {what}: {spread(ratios)}")


if __name__ == "__main__":
    main()
