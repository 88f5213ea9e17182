"""Seconds and accuracy of the recipes on MNIST: `python -m benchmarks.training --runs 5`.

Each run has a seed of its own. Seconds are those of the training loops, on whatever else the machine is doing.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any, Dict

import yaml

from benchmarks.engine import hardware, spread, train
from workflows.training.datasets import prepare
from workflows.training.hyperparameters import Hyperparameters

BEST = yaml.safe_load((Path(__file__).parents[1] / "presets" / "best.yaml").read_text())
RECIPES: Dict[str, Dict[str, Any]] = {
    "one epoch": {"epochs": 1},
    "one epoch, float32": {"epochs": 1, "precision": "float32"},
    "default": {},
    "presets/best.yaml": BEST,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=0)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    arguments = parser.parse_args()
    data = prepare("mnist")
    print(f"{hardware()}; n = {arguments.runs}\n")
    print("| recipe | ranks | training seconds, median [range] | test accuracy, mean ± standard deviation [range] |")
    print("|---|---|---|---|")
    for name in arguments.recipes:
        seconds, accuracies = [], []
        for seed in range(1, arguments.runs + 1):
            results = train(Hyperparameters(**{**RECIPES[name], "seed": seed}), data, arguments.nproc)
            seconds.append(sum(epoch.train_seconds for epoch in results[0].epochs))
            accuracies.append(100 * results[0].epochs[-1].accuracy)
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        print(
            f"| {name} | {len(results)} | {spread(seconds)} | {statistics.mean(accuracies):.2f} ± {deviation:.2f} % "
            f"[{min(accuracies):.2f}-{max(accuracies):.2f}] |",
            flush=True,
        )


if __name__ == "__main__":
    main()
