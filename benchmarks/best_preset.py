"""Chooses the recipe of presets/best.yaml without the test images, then measures the chosen one on them.

    python -m benchmarks.best_preset FOLDER [--runs 3] [--test-runs 5]

Every candidate is trained on 55,000 of MNIST's training images, and the one with the best mean accuracy over the seeds
on the other 5,000 is chosen. Only that one is then trained on all 60,000 and evaluated on the test images. Trainings
are kept in the folder: the same command resumes where it was interrupted. Use a new folder after changing the code.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engine import hardware
from benchmarks.training import HEAD, measure
from flyte_ddp.data.prepared.prepared import read_description
from flyte_ddp.data.sources.datasets import prepare

VALIDATION_FRACTION = 1 / 12
VARIED = {"shift_pixels": (1, 2), "ema_decay": (0.0, 0.999)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=3, help="seeds of each candidate")
    parser.add_argument("--test-runs", type=int, default=5, help="seeds of the chosen one")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dataset", default="mnist")
    arguments = parser.parse_args()
    data = prepare(arguments.dataset)
    print(f"{hardware()}; n = {arguments.runs}\n")
    held_out = round(VALIDATION_FRACTION * read_description(data).train_samples)
    print(f"Compared on {held_out:,} training images that are held out:\n")
    print(HEAD.format("held-out"))
    chosen: dict[str, Any] = {}
    highest = -1.0
    for values in itertools.product(*VARIED.values()):
        varied = dict(zip(VARIED, values, strict=True))
        name = ", ".join(f"{key} {value}" for key, value in varied.items())
        recipe = {"epochs": arguments.epochs, **varied}
        validated = {**recipe, "validation_fraction": VALIDATION_FRACTION}
        mean = measure(name, validated, data, arguments.runs, folder=arguments.folder)
        if mean > highest:
            chosen, highest = recipe, mean
    print(f"\nChosen:\n\n```yaml\n{yaml.safe_dump(chosen, sort_keys=False)}```\n")
    print(f"Trained on all images, n = {arguments.test_runs}:\n\n{HEAD.format('test')}")
    measure("chosen", chosen, data, arguments.test_runs, folder=arguments.folder)


if __name__ == "__main__":
    main()
