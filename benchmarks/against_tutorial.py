"""Compares the time to train MNIST with that of the tutorial: `python -m benchmarks.against_tutorial --runs 3`.

The tutorial trains its ten epochs on one rank per GPU, or on two ranks without GPUs; its final accuracy is the target.
Ours trains by presets/shortest.yaml, once on some of the images, and must reach the target: on the same number of
ranks, and on one rank with all cores. Seconds are those of the training loops alone, without evaluation. The trainings
alternate.
"""

import argparse
import gzip
import tempfile
from pathlib import Path

import yaml

from benchmarks.engine import hardware, spread, train
from benchmarks.tutorial import BATCH_SIZE, train_tutorial
from flyte_ddp.data.sources.datasets import data_dir, prepare
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters

SHORTEST = yaml.safe_load((Path(__file__).parents[1] / "presets" / "shortest.yaml").read_text())
FRACTION = SHORTEST["train_fraction"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10, help="of the tutorial")
    arguments = parser.parse_args()
    data = prepare("mnist")
    world = choose_world("auto", 0, BATCH_SIZE)
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


def ranks_in_words(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


if __name__ == "__main__":
    main()
