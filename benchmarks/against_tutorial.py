"""Compares the time to train MNIST with that of the tutorial: `python -m benchmarks.against_tutorial --runs 3`.

The tutorial trains its ten epochs on one rank per GPU, or on two ranks without GPUs; its final accuracy is the target.
Ours trains by presets/shortest.yaml, once on some of the images, and must reach the target: on the same number of
ranks, and on one rank with all cores. Seconds are those of the training loops alone, without evaluation. The trainings
alternate.

With --held-out it shows instead how their number was chosen, without the test images: after one pass over as many,
every seed has to reach the target on held-out training images.
"""

import argparse
import gzip
import tempfile
from pathlib import Path

import yaml

from benchmarks.engine import hardware, percent, spread, train
from benchmarks.tutorial import BATCH_SIZE, train_tutorial
from flyte_ddp.data.prepared.prepared import read_description
from flyte_ddp.data.sources.datasets import data_dir, prepare
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters

SHORTEST = yaml.safe_load((Path(__file__).parents[1] / "presets" / "shortest.yaml").read_text())
FRACTION = SHORTEST["train_fraction"]
VALIDATION_FRACTION = 1 / 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10, help="of the tutorial")
    parser.add_argument("--held-out", action="store_true", help="measure the accuracy on held-out images alone")
    arguments = parser.parse_args()
    data = prepare("mnist")
    world = choose_world("auto", 0, BATCH_SIZE)
    if arguments.held_out:
        measure_held_out(data, arguments.runs, world.size)
        return
    tutorial = f"the tutorial, {arguments.epochs} epochs, {ranks_in_words(world.size)}"
    found: dict[str, list[tuple[float, float]]] = {tutorial: []}
    with tempfile.TemporaryDirectory() as root:
        raw = Path(root, "MNIST", "raw")
        raw.mkdir(parents=True)
        for packed in (data_dir() / "MNIST" / "raw").glob("*.gz"):
            (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        for seed in range(1, arguments.runs + 1):
            epochs = train_tutorial(Path(root), arguments.epochs, world.size)
            found[tutorial].append((sum(epoch["seconds"] for epoch in epochs), 100 * epochs[-1]["accuracy"]))
            for ranks in sorted({world.size, 1}, reverse=True):
                hp = Hyperparameters(**SHORTEST, seed=seed)
                result = train(hp, data, ranks)[0].epochs[-1]
                name = f"ours, {FRACTION:.0%} of the images, {ranks_in_words(ranks)}"
                found.setdefault(name, []).append((result.train_seconds, 100 * result.test["accuracy"]))
    print(f"{hardware()}; n = {arguments.runs}, {world.backend}\n")
    print("| | training seconds, median [range] | test accuracy, % | tutorial / ours |")
    print("|---|---|---|---|")
    for name, runs in found.items():
        ratios = [theirs / ours for (theirs, _), (ours, _) in zip(found[tutorial], runs, strict=True)]
        of_seconds, of_accuracy = (spread(values) for values in zip(*runs, strict=True))
        print(f"| {name} | {of_seconds} | {of_accuracy} | {spread(ratios, 1)} |")


def measure_held_out(data: Path, runs: int, ranks: int) -> None:
    print("| images | trainings | accuracy on held-out images, mean ± standard deviation [range] |")
    print("|---|---|---|")
    for fraction in (FRACTION - 0.02, FRACTION):
        images = round(fraction * read_description(data).train_samples)
        accuracies = []
        for seed in range(1, runs + 1):
            share = fraction / (1 - VALIDATION_FRACTION)  # of the images that are not held out
            hp = Hyperparameters(
                **{**SHORTEST, "train_fraction": share, "validation_fraction": VALIDATION_FRACTION, "seed": seed}
            )
            epoch = train(hp, data, ranks)[0].epochs[-1]
            accuracies.append(100 * epoch.evaluated["accuracy"])
        print(f"| {images:,} | {runs} | {percent(accuracies)} |", flush=True)


def ranks_in_words(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


if __name__ == "__main__":
    main()
