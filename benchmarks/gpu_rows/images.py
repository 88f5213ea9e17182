"""Prepared datasets to train on, from a folder with the original files or made up."""

import gzip
import lzma
import pickle
from pathlib import Path

import numpy as np

from flyte_ddp.data.prepared.writer import write_prepared

CLASSES = [str(number) for number in range(10)]


def prepare(name: str, data: Path, place: Path) -> Path:
    """MNIST's files from data/MNIST/raw/*.gz, CIFAR-10's from data/CIFAR10/cifar-10-batches-py; FileNotFoundError."""
    train, test = (mnist if name == "mnist" else cifar10)(data)
    write_prepared(place / name, name, CLASSES, *train, *test)
    return place / name


def mnist(data: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    def read(name: str, head: int) -> np.ndarray:
        with gzip.open(data / "MNIST" / "raw" / f"{name}.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=head)

    return tuple(
        (read(f"{split}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28), read(f"{split}-labels-idx1-ubyte", 8))
        for split in ("train", "t10k")
    )


def cifar10(data: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    def read(*names: str) -> tuple[np.ndarray, np.ndarray]:
        batches = []
        for name in names:
            path = data / "CIFAR10" / "cifar-10-batches-py" / name
            with open(path, "rb") if path.exists() else lzma.open(f"{path}.xz") as file:
                batches.append(pickle.load(file, encoding="bytes"))
        images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
        return images, np.concatenate([batch[b"labels"] for batch in batches])

    return read(*(f"data_batch_{number}" for number in range(1, 6))), read("test_batch")


def made_up(shape: tuple[int, int, int], samples: int, place: Path) -> Path:
    """Noise with one bright row of pixels, whose position is the class."""
    random = np.random.default_rng(0)
    labels = np.arange(samples) % 10
    images = random.integers(0, 128, (samples, *shape), dtype=np.uint8)
    images[np.arange(samples), :, 2 * labels + 4] += 100
    folder = place / f"made-up-{'x'.join(map(str, shape))}-{samples}"
    write_prepared(folder, "made up", CLASSES, images, labels, images[:200], labels[:200])
    return folder
