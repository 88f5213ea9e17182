"""How much sooner MNIST is learnt than by the tutorial: `python -m benchmarks.against_tutorial --runs 3`.

The tutorial trains its ten epochs on two ranks; what it reaches then is the mark. Ours trains one epoch on two ranks
and has to reach the mark. Seconds are those of the training loops alone, evaluation not counted. The two take turns.
"""

import argparse
import gzip
import tempfile
from pathlib import Path

from benchmarks.engine import hardware, spread, train
from benchmarks.tutorial import train_tutorial
from workflows.training.datasets import data_dir, prepare
from workflows.training.hyperparameters import Hyperparameters

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10, help="of the tutorial")
    arguments = parser.parse_args()
    data = prepare("mnist")
    ratios, theirs, ours, marks, reached = [], [], [], [], []
    with tempfile.TemporaryDirectory() as root:
        raw = Path(root, "MNIST", "raw")
        raw.mkdir(parents=True)
        for packed in (data_dir() / "MNIST" / "raw").glob("*.gz"):
            (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        for seed in range(1, arguments.runs + 1):
            tutorial = train_tutorial(Path(root), arguments.epochs, RANKS)
            result = train(Hyperparameters(epochs=1, seed=seed), data, RANKS)[0].epochs[-1]
            theirs.append(sum(epoch["seconds"] for epoch in tutorial))
            ours.append(result.train_seconds)
            ratios.append(theirs[-1] / ours[-1])
            marks.append(100 * tutorial[-1]["accuracy"])
            reached.append(100 * result.accuracy)
    print(f"{hardware()}; n = {arguments.runs}, {RANKS} gloo ranks\n")
    print("| | training seconds, median [range] | test accuracy, % |")
    print("|---|---|---|")
    print(f"| the tutorial, {arguments.epochs} epochs | {spread(theirs, 1)} | {spread(marks)} |")
    print(f"| ours, 1 epoch | {spread(ours)} | {spread(reached)} |")
    print(f"\nTutorial / ours: {spread(ratios, 1)}")


if __name__ == "__main__":
    main()
