"""Seconds and accuracy of the recipes on MNIST: `python -m benchmarks.training --runs 5`.

Each run has its own seed. Seconds are those of the training loops, and depend on what else the machine is doing.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engine import hardware, percent, spread, train
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.recipes.hyperparameters import Hyperparameters

BEST = yaml.safe_load((Path(__file__).parents[1] / "presets" / "best.yaml").read_text())
RECIPES: dict[str, dict[str, Any]] = {
    "one epoch": {"epochs": 1},
    "one epoch, float32": {"epochs": 1, "precision": "float32"},
    "default": {},
    "presets/best.yaml": BEST,
}
HEAD = """| recipe | ranks | training seconds, median [range] | {} accuracy, mean ± standard deviation [range] |
|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=0)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    arguments = parser.parse_args()
    data = prepare("mnist")
    print(f"{hardware()}; n = {arguments.runs}\n")
    print(HEAD.format("test"))
    for name in arguments.recipes:
        measure(name, RECIPES[name], data, arguments.runs, arguments.nproc)


def measure(
    name: str, recipe: Mapping[str, Any], data: Path, runs: int, nproc: int = 0, folder: Path | None = None
) -> float:
    """Trains the recipe with the seeds from 1 to runs and prints its row; returns the mean accuracy in per cent.

    Trainings that are found in the folder are resumed, or reused if they are finished.
    """
    seconds, accuracies = [], []
    for seed in range(1, runs + 1):
        place = folder / name / str(seed) if folder else None
        if place:
            place.mkdir(parents=True, exist_ok=True)
        results = train(Hyperparameters(**{**recipe, "seed": seed}), data, nproc, str(place or ""))
        seconds.append(sum(epoch.train_seconds for epoch in results[0].epochs))
        accuracies.append(100 * results[0].epochs[-1].evaluated["accuracy"])
        by_epoch = ", ".join(f"{100 * epoch.evaluated['accuracy']:.2f}" for epoch in results[0].epochs)
        print(f"{name}, seed {seed}: {by_epoch} %, {seconds[-1]:.1f} s", file=sys.stderr)
    print(f"| {name} | {len(results)} | {spread(seconds)} | {percent(accuracies)} |", flush=True)
    return statistics.mean(accuracies)


if __name__ == "__main__":
    main()
