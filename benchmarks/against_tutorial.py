"""How much sooner MNIST is learnt than by the tutorial: `python -m benchmarks.against_tutorial --runs 3`.

The tutorial trains its ten epochs on two ranks; what it reaches then is the mark. Ours trains on FRACTION of the
images, once, and has to reach the mark: on two ranks too, and on one rank that has both cores. Seconds are those of the
training loops alone, evaluation not counted. They take turns.
"""

import argparse
import gzip
import tempfile
from pathlib import Path
from typing import Dict, List, Tuple

from benchmarks.engine import hardware, spread, train
from benchmarks.tutorial import train_tutorial
from workflows.training.datasets import data_dir, prepare
from workflows.training.hyperparameters import Hyperparameters

RANKS = 2
FRACTION = 0.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10, help="of the tutorial")
    arguments = parser.parse_args()
    data = prepare("mnist")
    tutorial, seconds = f"the tutorial, {arguments.epochs} epochs, {RANKS} ranks", "training seconds, median [range]"
    found: Dict[str, List[Tuple[float, float]]] = {tutorial: []}
    with tempfile.TemporaryDirectory() as root:
        raw = Path(root, "MNIST", "raw")
        raw.mkdir(parents=True)
        for packed in (data_dir() / "MNIST" / "raw").glob("*.gz"):
            (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        for seed in range(1, arguments.runs + 1):
            epochs = train_tutorial(Path(root), arguments.epochs, RANKS)
            found[tutorial].append((sum(epoch["seconds"] for epoch in epochs), 100 * epochs[-1]["accuracy"]))
            for ranks in (RANKS, 1):
                hp = Hyperparameters(epochs=1, train_fraction=FRACTION, seed=seed, backend="gloo")
                result = train(hp, data, ranks)[0].epochs[-1]
                name = f"ours, {FRACTION:.0%} of the images, {ranks} rank{'s' * (ranks > 1)}"
                found.setdefault(name, []).append((result.train_seconds, 100 * result.accuracy))
    print(f"{hardware()}; n = {arguments.runs}, gloo\n\n| | {seconds} | test accuracy, % | tutorial / ours |")
    print("|---|---|---|---|")
    for name, runs in found.items():
        ratios = [theirs / ours for (theirs, _), (ours, _) in zip(found[tutorial], runs, strict=True)]
        of_seconds, of_accuracy = (spread(values) for values in zip(*runs, strict=True))
        print(f"| {name} | {of_seconds} | {of_accuracy} | {spread(ratios, 1)} |")


if __name__ == "__main__":
    main()
