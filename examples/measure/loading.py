"""The speed of loading images against the number of DataLoader's workers, and a picture of a batch.

PYTHONPATH=. pyflyte run examples/measure/loading.py loading_wf --folder path/to/images --workers '[0, 1, 2, 4]'
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.benchmark import Timer
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.utils import make_grid

from flyte_ddp.flyte1.resources import training_resources
from measure.page import show


class LoadingOutputs(NamedTuple):
    """The outputs: the median of images per second, by number of workers, and a page with the figure and a batch."""

    images_per_second: dict[str, float]
    report: FlyteFile


@task(enable_deck=True, deck_fields=(), **{**training_resources(most_gpus=1), "shared_memory": True})
def time_loading(
    folder: FlyteDirectory | None, workers: list[int], batch_size: int, side: int, most_images: int, repeats: int
) -> LoadingOutputs:
    if not workers or min(workers) < 0:
        raise ValueError(f"workers must be whole numbers from 0, got {workers}: give some, such as [0, 2]")
    transform = v2.Compose([v2.Resize(side), v2.CenterCrop(side), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    images = ImageFolder(folder.download() if folder else written_digits(), transform)
    some = Subset(
        images, torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:most_images].tolist()
    )
    rates = {}
    for number in sorted({*workers}):
        loader = DataLoader(
            some, batch_size, num_workers=number, pin_memory=torch.cuda.is_available(), persistent_workers=number > 0
        )
        timer = Timer("for batch in loader: pass", globals={"loader": loader}, num_threads=torch.get_num_threads())
        rates[number] = len(some) / np.array([timer.timeit(1).median for _ in range(repeats)])
        print(f"{number} workers: {np.median(rates[number]):,.0f} images per second")
    batch, labels = next(iter(DataLoader(some, min(batch_size, 32))))
    what = f"{len(some):,} images of {side} x {side}, batches of {batch_size}; median and range of {repeats} passes"
    names = ", ".join(images.classes[label] for label in labels)
    return LoadingOutputs(
        {str(number): float(np.median(values)) for number, values in rates.items()},
        show("Loading against workers", what, draw(rates), picture(batch, names)),
    )


def written_digits() -> str:
    """Write scikit-learn's digits as PNG files, a sub-folder for each class, and return the folder."""
    folder, digits = Path(tempfile.mkdtemp()), load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray((image * 15.9).astype(np.uint8)).save(folder / str(label) / f"{number}.png")
    return str(folder)


def draw(rates: dict[int, np.ndarray]) -> Figure:
    """Draw images per second, with the range, over the number of workers."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    low, middle, high = np.array([np.percentile(values, (0, 50, 100)) for values in rates.values()]).T
    axes.errorbar([*rates], middle, (middle - low, high - middle), marker="o", capsize=3)
    axes.set(xlabel="workers", ylabel="images per second", xticks=[*rates], ylim=(0, None))
    axes.grid(alpha=0.3)
    return figure


def picture(batch: torch.Tensor, names: str) -> Figure:
    """Draw a batch (n, 3, H, W) of values from 0 to 1 as one picture."""
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    axes.imshow(make_grid(batch, nrow=8).permute(1, 2, 0).numpy())
    axes.set_title(f"A batch: {names}", fontsize=8, wrap=True)
    axes.set_axis_off()
    return figure


@workflow
def loading_wf(
    folder: FlyteDirectory | None = None,
    workers: list[int] = [0, 1, 2, 4],
    batch_size: int = 128,
    side: int = 64,
    most_images: int = 1000,
    repeats: int = 5,
) -> LoadingOutputs:
    """Time how fast images are read, decoded and scaled.

    Args:
        folder: a folder with a sub-folder of image files for each class; by default scikit-learn's digits.
        workers: numbers of DataLoader's workers to try; 0 loads in the process itself.
        batch_size: images of a batch.
        side: pixels that each image is scaled and cropped to.
        most_images: the largest number of images of a pass.
        repeats: how many passes over the images are timed, after those that start the workers.
    """
    return time_loading(
        folder=folder, workers=workers, batch_size=batch_size, side=side, most_images=most_images, repeats=repeats
    )
