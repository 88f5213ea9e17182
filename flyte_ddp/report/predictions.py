"""The images that a run shows: correctly classified ones, mistakes, and samples of the data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.data.image_files import ImageFiles
from flyte_ddp.data.prepared.prepared import open_images, read_description
from flyte_ddp.report.article import Drawing
from flyte_ddp.report.figures import picture
from flyte_ddp.report.record import Record, RunFinished, RunInfo
from flyte_ddp.text import explain_error

MOST_CLASSES = 20  # in a confusion matrix that can be read
MOST_BARS = 40
MOST_MISTAKES = 24
MOST_SAMPLES = 20
MOST_DRAWN = 24


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
        """Return the probability that the network gave its guess, from 0 to 1."""
        return float(np.exp(self.scores[index].max()))

    def confusion(self) -> np.ndarray:
        """Return counts (classes, classes), with true classes as rows and predicted ones as columns."""
        classes = self.scores.shape[1]
        return np.bincount(self.labels * classes + self.guesses, minlength=classes**2).reshape(classes, classes)

    def class_accuracies(self) -> list[tuple[int, int]]:
        """Return for each class how many of its images were classified correctly, and how many there are."""
        confusion = self.confusion()
        return list(zip(confusion.diagonal().tolist(), confusion.sum(axis=1).tolist(), strict=True))

    def confident_mistakes(self, count: int) -> list[int]:
        """Return the indices of wrongly classified images, the most confident first."""
        wrong = np.flatnonzero(self.guesses != self.labels)
        return wrong[np.argsort(-self.scores[wrong].max(axis=1), kind="stable")][:count].tolist()


def load_predictions(info: RunInfo, finished: RunFinished) -> Predictions | None:
    """Return rank 0's predictions on a prepared dataset's test split; None for recipes other than image classifiers."""
    if info.data is None or finished.predictions_path is None:
        return None
    images, labels = open_images(info.data, "test")
    return Predictions(read_description(info.data).classes, images, labels, np.load(finished.predictions_path))


def describe_predictions(record: Record) -> dict[str, Any]:
    """Return what the page shows of the predictions: accuracy by class, mistakes and the confusion matrix.

    Returns:
        Values for the page's template:

        - "classes": for each class, its name, a pair of texts such as ("9 of 10", "90.00%"), and the accuracy in per
          cent. A class without images has ("0 of 0", "-") and 0.0. If there are more than MOST_BARS classes, the list
          has the MOST_BARS worst classes with images, the worst first.
        - "mistakes": for each of the MOST_MISTAKES most confident mistakes, the image as a data URI, its index, the
          names of the true and of the predicted class, and a text such as "98.1% sure".
        - "cells": the confusion matrix, a row for each true class; [] if there are more than MOST_CLASSES classes.
        - "names": the names of all classes.
        - "roomy": whether the matrix's cells need more space.

        If the run has not finished, or is no image classifier's, "classes", "mistakes" and "cells" are [], and "names"
        and "roomy" are missing.
    """
    predictions = load_predictions(record.info, record.finished) if record.finished else None
    if predictions is None:
        return {"classes": [], "mistakes": [], "cells": []}
    names = predictions.classes
    confusion = predictions.confusion()
    accuracies = [(names[label], *pair) for label, pair in enumerate(predictions.class_accuracies())]
    if len(accuracies) > MOST_BARS:
        tested = [one for one in accuracies if one[2]]
        accuracies = sorted(tested, key=lambda one: one[1] / one[2])[:MOST_BARS]
    classes = [
        (
            name,
            (f"{right:,} of {count:,}", f"{right / count:.2%}" if count else "-"),
            round(100 * right / max(count, 1), 1),
        )
        for name, right, count in accuracies
    ]
    mistakes = [
        (
            picture(predictions.images[index]),
            index,
            names[predictions.labels[index]],
            names[predictions.guesses[index]],
            f"{predictions.probability(index):.1%} sure",
        )
        for index in predictions.confident_mistakes(MOST_MISTAKES)
    ]
    return {
        "classes": classes,
        "mistakes": mistakes,
        "names": names,
        "cells": _confusion(confusion) if len(names) <= MOST_CLASSES else [],
        "roomy": max(map(len, names)) > 3 or confusion.max() > 999,
    }


def _confusion(counts: np.ndarray) -> list[list[tuple[int, str, str, str]]]:
    """Return the cells of a confusion matrix for the page's template, row by row: (count, heat, kind, look) each.

    "heat" is the opacity of the cell's colour, from "0.00" to "1.00", which grows with the cell's share of its row.
    "kind" is "right" on the diagonal and "wrong" elsewhere. "look" is the cell's CSS class: "hot" for a dark cell,
    "none" for a count of 0, and "" otherwise.

    Args:
        counts: (classes, classes), a row for each true class.
    """
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    right = np.eye(len(counts), dtype=bool)
    # Rare mistakes would be invisible if they were not shaded more strongly than correct predictions
    heats = np.where(right, fractions, np.minimum(1, 4 * np.sqrt(fractions)))
    # A medium shade would contrast with neither dark nor light text
    heats = np.where(heats > 0.5, np.maximum(heats, 0.85), heats)
    looks = np.where(heats > 0.5, "hot", np.where(counts, "", "none"))
    kinds = np.where(right, "right", "wrong")
    rows = zip(counts, heats, kinds, looks, strict=True)
    return [[(count, f"{heat:.2f}", kind, look) for count, heat, kind, look in zip(*row, strict=True)] for row in rows]


def sample_pictures(info: RunInfo) -> list[tuple[str, str]]:
    """Return training images of an image classifier, some of each class: pairs of a data URI and the class's name.

    All classes have equally many images, at most MOST_SAMPLES in all. A class may have fewer if it is rare: at most
    about 20,000 images, evenly spread, are searched. If there are more than MOST_SAMPLES classes, the last ones have
    none. For other recipes, the list is empty.
    """
    if not info.data or not info.description:
        return []
    names: Sequence[str] = info.description.classes
    images, labels = open_images(info.data, "train")
    step = max(1, len(labels) // 10_000)  # enough to find every class, also if they are sorted
    labels = labels[::step]
    each = max(1, MOST_SAMPLES // max(1, len(names)))
    samples: list[tuple[int, str]] = []
    for label, name in enumerate(names):
        samples += [(step * index, name) for index in np.flatnonzero(labels == label)[:each]]
    return [(picture(images[index]), name) for index, name in samples[:MOST_SAMPLES]]


def drawn_figures(logs: Path) -> list[Drawing]:
    """Return the figures that a training has drawn itself, if any: figures/TITLE.svg."""
    paths = sorted((logs / "figures").glob("*.svg"))
    return [Drawing(path.stem, path.read_text(encoding="utf-8", errors="replace")) for path in paths[:MOST_DRAWN]]


def drawn_pictures(logs: Path) -> list[tuple[str, str]]:
    """Read the pictures that a recipe has drawn, at most MOST_DRAWN, from pictures.npz in the folder of logs.

    The file has an array "captions", and arrays "0", "1", … of images (C, H, W) uint8.

    Returns:
        Pairs of a data URI and a caption; [] if there is no file. If the file cannot be read, one pair with an empty
        image, and a caption that says why.
    """
    path = logs / "pictures.npz"
    if not path.exists():
        return []
    try:
        with np.load(path, allow_pickle=False) as drawn:
            captions = drawn["captions"][:MOST_DRAWN]
            return [(picture(drawn[str(number)]), str(caption)) for number, caption in enumerate(captions)]
    except Exception as error:  # a user's module has written the file, or is still writing it
        return [("data:,", f"{path.name} cannot be shown: {explain_error(error)}")]
