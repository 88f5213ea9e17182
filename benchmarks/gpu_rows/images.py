"""Prepared datasets to train on, from a folder with the original files or made up."""

import gzip
from pathlib import Path

import numpy as np

from flyte_ddp.data.prepared.writer import write_prepared

CLASSES = [str(number) for number in range(10)]


def mnist(data: Path, place: Path) -> Path:
    """MNIST's files from data/MNIST/raw/*.gz; FileNotFoundError."""

    def read(name: str, head: int) -> np.ndarray:
        with gzip.open(data / "MNIST" / "raw" / f"{name}.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=head)

    splits = [
        (read(f"{split}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28), read(f"{split}-labels-idx1-ubyte", 8))
        for split in ("train", "t10k")
    ]
    write_prepared(place / "mnist", "mnist", CLASSES, *splits[0], *splits[1])
    return place / "mnist"


def made_up(shape: tuple[int, int, int], samples: int, place: Path) -> Path:
    """Noise with one bright row of pixels, whose position is the class."""
    random = np.random.default_rng(0)
    labels = np.arange(samples) % 10
    images = random.integers(0, 128, (samples, *shape), dtype=np.uint8)
    images[np.arange(samples), :, 2 * labels + 4] += 100
    folder = place / f"made-up-{'x'.join(map(str, shape))}-{samples}"
    write_prepared(folder, "made up", CLASSES, images, labels, images[:200], labels[:200])
    return folder
