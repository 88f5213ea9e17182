"""What the report shows of images: which were classified correctly, which were not, and what they look like."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.report.figures import picture
from flyte_ddp.report.predictions import Predictions, samples_by_class

MOST_CLASSES = 20  # in a confusion matrix that can be read
MOST_BARS = 40
MOST_MISTAKES = 24
MOST_SAMPLES = 20
MOST_DRAWN = 24


def verdict(predictions: Predictions) -> dict[str, Any]:
    """Confusion matrix, accuracy by class, and the most confident mistakes."""
    names = predictions.classes
    classes: list[dict[str, Any]] = [
        {
            "label": names[label],
            "values": [f"{right:,} of {count:,}", f"{right / count:.2%}" if count else "-"],
            "share": round(100 * right / max(count, 1), 1),
        }
        for label, (right, count) in enumerate(predictions.class_accuracies())
    ]
    if len(classes) > MOST_BARS:
        classes = sorted(classes, key=lambda line: line["share"])[:MOST_BARS]  # the worst
    mistakes = [
        {
            "index": index,
            "picture": picture(predictions.images[index]),
            "truth": names[predictions.labels[index]],
            "guess": names[predictions.guesses[index]],
            "sure": f"{predictions.probability(index):.1%} sure",
        }
        for index in predictions.confident_mistakes(MOST_MISTAKES)
    ]
    matrix = _confusion(names, predictions.confusion()) if len(names) <= MOST_CLASSES else None
    return {"confusion": matrix, "classes": classes, "mistakes": mistakes}


def _confusion(names: Sequence[str], counts: np.ndarray) -> dict[str, Any]:
    """Cells shaded by their share of the row; mistakes much more strongly, or they would not be visible."""
    columns = range(len(names))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    heats = np.where(np.eye(len(names), dtype=bool), shares, np.minimum(1, 4 * np.sqrt(shares)))
    lines = [
        {"name": name, "cells": [_cell(counts[row, column], heats[row, column], row == column) for column in columns]}
        for row, name in enumerate(names)
    ]
    return {"names": names, "lines": lines, "roomy": max(map(len, names)) > 3 or counts.max() > 999}


def _cell(count: int, heat: float, right: bool) -> dict[str, str]:
    # A medium shade would contrast with neither dark nor light text
    heat, look = (max(heat, 0.85), "hot") if heat > 0.5 else (heat, "" if count else "none")
    return {"count": str(count), "heat": f"{heat:.2f}", "kind": "right" if right else "wrong", "look": look}


def sample_pictures(data: Path, names: Sequence[str]) -> list[dict[str, str]]:
    """A few training images of each class, with the names of the classes."""
    samples = samples_by_class(data, len(names), MOST_SAMPLES)
    return [{"picture": picture(image), "name": names[label]} for label, image in samples]


def drawn_figures(logs: Path) -> list[dict[str, Any]]:
    """Figures that a training has drawn itself, if any: figures/TITLE.svg."""
    from markupsafe import Markup

    paths = sorted((logs / "figures").glob("*.svg"))
    return [{"title": path.stem, "svg": Markup(path.read_text(encoding="utf-8"))} for path in paths[:MOST_DRAWN]]


def drawn_pictures(logs: Path) -> list[dict[str, str]]:
    """A recipe's pictures, if any: pictures.npz has n captions, and images (C, H, W) uint8 as "0", "1", …"""
    path = logs / "pictures.npz"
    if not path.exists():
        return []
    with np.load(path, allow_pickle=False) as drawn:
        return [
            {"picture": picture(drawn[str(number)]), "caption": str(caption)}
            for number, caption in enumerate(drawn["captions"][:MOST_DRAWN])
        ]
