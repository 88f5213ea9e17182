"""CIFAR-10 with the recipe of Oracle's example and with ours, side by side: `python -m benchmarks.cifar10 --runs 1`.

The example's recipe: three convolutions, SGD 0.001 with momentum 0.9, batches of 16, no augmentation, float32. Ours
trains the same network, then the default one, with the one-cycle schedule, and the default one next to the recipe for
GPUs on a short schedule. Seconds are those of the training loops; a line on stderr has the accuracy after each epoch.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engine import hardware
from benchmarks.training import HEAD, measure
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.recipes.hyperparameters import CIFAR10Hyperparameters

EXAMPLE: dict[str, Any] = {
    "model": "cifar_cnn",
    "batch_size": 16,
    "learning_rate": 0.001,
    "nesterov": False,
    "schedule": "constant",
    "weight_decay": 0.0,
    "clip_norm": 0.0,
    "label_smoothing": 0.0,
    "precision": "float32",
}
OURS = asdict(CIFAR10Hyperparameters())
FAST = yaml.safe_load((Path(__file__).parents[1] / "presets" / "cifar10-94.yaml").read_text())
RECIPES: dict[str, dict[str, Any]] = {
    "the example's": {**EXAMPLE, "epochs": 10},
    "the example's network by our recipe, 4 epochs": {**OURS, "model": "cifar_cnn", "epochs": 4, "shift_pixels": 0},
    "workflows/cifar10.py": OURS,
    "workflows/cifar10.py, 3 epochs": {**OURS, "epochs": 3},
    "presets/cifar10-94.yaml, 3 epochs": {**FAST, "epochs": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    arguments = parser.parse_args()
    data = prepare("cifar10")
    print(f"{hardware()}; n = {arguments.runs}\n\n{HEAD.format('test')}")
    for name in arguments.recipes:
        measure(name, RECIPES[name], data, arguments.runs)


if __name__ == "__main__":
    main()
