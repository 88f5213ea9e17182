"""What the report shows of images: which were classified correctly, which were not, and what they look like."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.data.prepared.prepared import open_images
from flyte_ddp.report.article import Drawing
from flyte_ddp.report.figures import picture
from flyte_ddp.report.predictions import predictions_of
from flyte_ddp.report.record import Record, RunInfo
from flyte_ddp.text import reason_of

MOST_CLASSES = 20  # in a confusion matrix that can be read
MOST_BARS = 40
MOST_MISTAKES = 24
MOST_SAMPLES = 20
MOST_DRAWN = 24


def verdict(record: Record) -> dict[str, Any]:
    """Accuracy by class, the most confident mistakes, and the cells of a confusion matrix; all empty while there are
    no predictions, or for other recipes than image classifiers."""
    predictions = predictions_of(record.info, record.finished) if record.finished else None
    if predictions is None:
        return {"classes": [], "mistakes": [], "cells": []}
    names, confusion = predictions.classes, predictions.confusion()
    classes = [
        (
            names[label],
            (f"{right:,} of {count:,}", f"{right / count:.2%}" if count else "-"),
            round(100 * right / max(count, 1), 1),
        )
        for label, (right, count) in enumerate(predictions.class_accuracies())
    ]
    if len(classes) > MOST_BARS:
        classes = sorted(classes, key=lambda line: line[-1])[:MOST_BARS]  # the worst
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
    """Count, heat, kind and look of each cell: shaded by its share of the row, mistakes much more strongly, or they
    would not be visible."""
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    right = np.eye(len(counts), dtype=bool)
    heats = np.where(right, fractions, np.minimum(1, 4 * np.sqrt(fractions)))
    # A medium shade would contrast with neither dark nor light text
    heats = np.where(heats > 0.5, np.maximum(heats, 0.85), heats)
    looks = np.where(heats > 0.5, "hot", np.where(counts, "", "none"))
    kinds = np.where(right, "right", "wrong")
    rows = zip(counts, heats, kinds, looks, strict=True)
    return [[(count, f"{heat:.2f}", kind, look) for count, heat, kind, look in zip(*row, strict=True)] for row in rows]


def sample_pictures(info: RunInfo) -> list[tuple[str, str]]:
    """A few training images of an image classifier, the same number of each class, and the names of the classes."""
    if not info.data or not info.description:
        return []
    names: Sequence[str] = info.description.classes
    images, labels = open_images(info.data, "train")
    labels = labels[:10_000]  # enough to find every class
    each = max(1, MOST_SAMPLES // max(1, len(names)))
    samples = [(index, name) for label, name in enumerate(names) for index in np.flatnonzero(labels == label)[:each]]
    return [(picture(images[index]), name) for index, name in samples[:MOST_SAMPLES]]


def drawn_figures(logs: Path) -> list[Drawing]:
    """Figures that a training has drawn itself, if any: figures/TITLE.svg."""
    paths = sorted((logs / "figures").glob("*.svg"))
    return [Drawing(path.stem, path.read_text(encoding="utf-8", errors="replace")) for path in paths[:MOST_DRAWN]]


def drawn_pictures(logs: Path) -> list[tuple[str, str]]:
    """A recipe's pictures, if any: pictures.npz has n captions, and images (C, H, W) uint8 as "0", "1", …"""
    path = logs / "pictures.npz"
    if not path.exists():
        return []
    try:
        with np.load(path, allow_pickle=False) as drawn:
            captions = drawn["captions"][:MOST_DRAWN]
            return [(picture(drawn[str(number)]), str(caption)) for number, caption in enumerate(captions)]
    except Exception as error:  # a user's module has written it, or is about to
        return [("data:,", f"{path.name} cannot be shown: {reason_of(error)}")]
