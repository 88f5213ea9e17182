"""What Datasets as people write them are made of here: random images and sounds, and a library's modules."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import Dataset

COUNT, SIZE, CLASSES = 30, 32, 4


def library(name: str) -> Any:
    return importlib.import_module(name)


def images() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (COUNT, SIZE, SIZE, 3), dtype=np.uint8)


def pictures() -> list[Any]:
    return [library("PIL.Image").fromarray(image) for image in images()]


def sounds() -> np.ndarray:
    return np.random.default_rng(2).normal(0, 0.1, (COUNT, 1600)).astype(np.float32)


class Counted(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT


class Transformed(Dataset[Any]):
    """What most people write: a list, a label, a transform."""

    def __init__(self, samples: Any, transform: Callable[[Any], Any]):
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.samples[index]), index % CLASSES
