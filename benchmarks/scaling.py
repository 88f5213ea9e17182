"""How the cost of an epoch of MNIST grows with the number of images and of gloo ranks; it should be linear.

    python -m benchmarks.scaling --runs 3 [--plot FILE.svg]

The images are MNIST's first ones, or all of them several times over. Ranks that share a core cannot be faster than a
single rank on it: what can be compared on any machine is the CPU time of all ranks together, and their memory. Linux
only.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.engine import hardware, spread, train
from benchmarks.stopwatch import Cost
from flyte_ddp.data.prepared.prepared import open_split, read_description
from flyte_ddp.data.prepared.writer import write_prepared
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.recipes.hyperparameters import Hyperparameters

WORKER = "benchmarks.stopwatch:count_cost"
IMAGES, RANKS, USUAL_RANKS = (15_000, 60_000, 240_000), (1, 2, 4), 2

Cell = tuple[int, int]  # images, ranks
Costs = dict[Cell, list[Cost]]  # of each run, all ranks together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--images", type=int, nargs=3, default=IMAGES, help="the second number on all numbers of ranks")
    parser.add_argument("--plot", help="file to plot to")
    arguments = parser.parse_args()
    by_images: list[Cell] = [(images, USUAL_RANKS) for images in arguments.images]
    by_ranks: list[Cell] = [(arguments.images[1], ranks) for ranks in RANKS]
    costs = measure(sorted({*by_images, *by_ranks}), arguments.runs)
    print(f"{hardware()}; n = {arguments.runs}\n")
    print("| images | ranks | seconds, median [range] | CPU seconds, all ranks | private MiB per rank |")
    print("|---|---|---|---|---|")
    for (images, ranks), runs in costs.items():
        seconds, processor_seconds, own_bytes = zip(*runs, strict=True)
        mebibytes = spread([total / ranks / 2**20 for total in own_bytes], 0)
        print(f"| {images:,} | {ranks} | {spread(seconds)} | {spread(processor_seconds)} | {mebibytes} |")
    sizes, numbers = (spread(ratios(costs, cells[-1], cells[0])) for cells in (by_images, by_ranks))
    print(f"\nCPU time per image, {by_images[-1][0]:,} / {by_images[0][0]:,} images: {sizes}")
    print(f"\nCPU time per image, {RANKS[-1]} ranks / {RANKS[0]} rank: {numbers}")
    if arguments.plot:
        plot(costs, by_images, by_ranks, arguments.plot)
        print(f"\n![The same, plotted]({Path(arguments.plot).name})")


def measure(cells: list[Cell], runs: int) -> Costs:
    """One epoch in each cell, several times, forwards and backwards through the cells."""
    costs: Costs = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        for images in {images for images, _ in cells}:
            write_resized(Path(folder, str(images)), images)
        for number in range(runs):
            hp = Hyperparameters(epochs=1, seed=number + 1, backend="gloo")
            for images, ranks in sorted(cells, reverse=number % 2 == 1):
                of_ranks = train(hp, Path(folder, str(images)), ranks, worker=WORKER)
                seconds, processor_seconds, own_bytes = zip(*of_ranks, strict=True)
                costs[images, ranks].append(Cost(max(seconds), sum(processor_seconds), sum(own_bytes)))
    return costs


def write_resized(folder: Path, count: int) -> None:
    """MNIST with this many training images."""
    data = prepare("mnist")
    images, labels = open_split(data, "train")
    resized = np.resize(images, (count, *images.shape[1:])), np.resize(labels, count)
    write_prepared(folder, "mnist", read_description(data).classes, *resized, *open_split(data, "test"))


def ratios(costs: Costs, cell: Cell, other: Cell) -> list[float]:
    """CPU time per image in a cell, relative to another one; run by run."""
    of_cell, of_other = ([run.processor_seconds / images for run in costs[images, n]] for images, n in (cell, other))
    return [mine / theirs for mine, theirs in zip(of_cell, of_other, strict=True)]


def plot(costs: Costs, by_images: list[Cell], by_ranks: list[Cell], path: str) -> None:
    """Medians as an SVG with text as text and colours of its own; the same file for the same costs."""
    import matplotlib
    from matplotlib.figure import Figure

    def medians(field: str, cells: list[Cell]) -> list[float]:
        return [statistics.median(getattr(run, field) for run in costs[cell]) for cell in cells]

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scaling", "font.size": 9}):
        figure = Figure(figsize=(10, 3), layout="constrained")
        of_images, of_ranks, memory = figure.subplots(1, 3)
        sizes = [images for images, _ in by_images]
        for axes, x, cells in ((of_images, sizes, by_images), (of_ranks, RANKS, by_ranks)):
            axes.plot(x, medians("processor_seconds", cells), "o-", label="CPU seconds, all ranks")
            axes.plot(x, medians("seconds", cells), "s--", label="seconds")
            axes.legend(frameon=False)
        memory.plot(RANKS, [total / 2**20 for total in medians("own_bytes", by_ranks)], "o-")
        of_images.set(title=f"An epoch on {USUAL_RANKS} ranks", xlabel="images", xticks=sizes)
        of_images.xaxis.set_major_formatter("{x:,.0f}")
        of_ranks.set(title=f"An epoch of {by_ranks[0][0]:,} images", xlabel="ranks", xticks=RANKS)
        memory.set(title="All ranks' private memory, MiB", xlabel="ranks", xticks=RANKS)
        for axes in (of_images, of_ranks, memory):
            axes.set(xlim=(0, None), ylim=(0, None))
            axes.grid(color="#dddddd")
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
