"""Accuracy and seconds on MNIST written out as 70,000 PNG files: `python -m benchmarks.image_folder --runs 3`.

The recipe is that of workflows/mnist.py; the only difference is that every image is decoded in every epoch.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.engine import hardware, percent, spread, train
from flyte_ddp.data.image_files import link_images
from flyte_ddp.data.prepared.prepared import SPLITS, open_split
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_index import index_folder, write_folder
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.recipes.hyperparameters import FolderHyperparameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--nproc", type=int, default=0)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2], help="loader workers of each rank")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp-") as scratch:
        folder = Path(scratch, "mnist")
        folder.mkdir()
        for split in SPLITS:
            write_folder(folder / split, [str(digit) for digit in range(10)], *open_split(prepare("mnist"), split))
        data = index_folder(folder, "mnist", ImageSettings(image_size=28, channels="grayscale"), print)
        print(f"{hardware()}; n = {arguments.runs}\n")
        print(
            "| loader workers | training seconds, median [range] | test accuracy, mean ± standard deviation [range] |"
        )
        print("|---|---|---|")
        link_images(data, folder)
        for workers in arguments.workers:
            seconds, accuracies = [], []
            for seed in range(1, arguments.runs + 1):
                hp = FolderHyperparameters(batch_size=128, learning_rate=0.2, epochs=2, seed=seed)
                results = train(hp, data, arguments.nproc, loader_workers=workers)
                seconds.append(sum(epoch.train_seconds for epoch in results[0].epochs))
                accuracies.append(100 * results[0].epochs[-1].test["accuracy"])
            print(f"| {workers} | {spread(seconds)} | {percent(accuracies)} |", flush=True)


if __name__ == "__main__":
    main()
