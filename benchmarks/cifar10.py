"""CIFAR-10 with the recipe of Oracle's example and with ours, side by side: `python -m benchmarks.cifar10 --runs 1`.

The example's recipe: three convolutions, SGD 0.001 with momentum 0.9, batches of 16, no augmentation, float32. Ours
trains the same network, then the default one, with the one-cycle schedule. Seconds are those of the training loops.
"""

import argparse
from dataclasses import asdict
from typing import Any, Dict

from benchmarks.engine import hardware
from benchmarks.training import HEAD, measure
from flyte_ddp.data.datasets import prepare
from flyte_ddp.recipes.hyperparameters import CIFAR10Hyperparameters

EXAMPLE: Dict[str, Any] = {
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--example-epochs", type=int, default=10)
    arguments = parser.parse_args()
    data = prepare("cifar10")
    recipes = {
        f"the example's, {arguments.example_epochs} epochs": {**EXAMPLE, "epochs": arguments.example_epochs},
        "the example's network by our recipe, 4 epochs": {**OURS, "model": "cifar_cnn", "epochs": 4, "shift_pixels": 0},
        "workflows/cifar10.py": OURS,
    }
    print(f"{hardware()}; n = {arguments.runs}\n\n{HEAD.format('test')}")
    for name, recipe in recipes.items():
        measure(name, recipe, data, arguments.runs)


if __name__ == "__main__":
    main()
