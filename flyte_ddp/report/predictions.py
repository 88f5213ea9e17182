"""A trained network's predictions on the test images: where it is right, where it is wrong, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flyte_ddp.data.image_files import ImageFiles
from flyte_ddp.data.prepared.prepared import open_images, read_description
from flyte_ddp.report.record import RunFinished, RunInfo


@dataclass(frozen=True)
class Predictions:
    """Predictions on N test images.

    Attributes:
        classes: names, in the order of the labels.
        images: (N, C, H, W) uint8, memory-mapped or decoded by index.
        labels: (N,), the true classes.
        scores: (N, classes), log-probabilities.
    """

    classes: Sequence[str]
    images: np.ndarray | ImageFiles
    labels: np.ndarray
    scores: np.ndarray

    @property
    def guesses(self) -> np.ndarray:
        return self.scores.argmax(axis=1)

    def probability(self, index: int) -> float:
        """How sure the network was of its guess, from 0 to 1."""
        return float(np.exp(self.scores[index].max()))

    def confusion(self) -> np.ndarray:
        """(classes, classes) counts, with true classes as rows and predicted ones as columns."""
        classes = self.scores.shape[1]
        return np.bincount(self.labels * classes + self.guesses, minlength=classes**2).reshape(classes, classes)

    def class_accuracies(self) -> list[tuple[int, int]]:
        """For each class: how many of its images were classified correctly, and how many there are."""
        confusion = self.confusion()
        return list(zip(confusion.diagonal().tolist(), confusion.sum(axis=1).tolist(), strict=True))

    def confident_mistakes(self, count: int) -> list[int]:
        """Indices of wrongly classified images, the most confident first."""
        wrong = np.flatnonzero(self.guesses != self.labels)
        return wrong[np.argsort(-self.scores[wrong].max(axis=1), kind="stable")][:count].tolist()


def predictions_of(info: RunInfo, finished: RunFinished) -> Predictions | None:
    """What rank 0 wrote of the test split of a prepared dataset; None for other recipes than image classifiers."""
    if info.data is None or finished.predictions_path is None:
        return None
    images, labels = open_images(info.data, "test")
    return Predictions(read_description(info.data).classes, images, labels, np.load(finished.predictions_path))
