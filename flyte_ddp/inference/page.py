"""The results of batch prediction: counts of its rows, and a page."""

import heapq
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.inference.shards import InferenceOptions, Row, read_rows
from flyte_ddp.report.article import Section, article, setup_section
from flyte_ddp.report.figures import picture

MOST_PICTURES = 24
MOST_ERRORS = 20


class Tally(NamedTuple):
    """Counts of rows.

    Attributes:
        predicted: number of images by predicted class.
        known: number of images with a prediction, by true class.
        right: number of correctly predicted images, by true class.
        unreadable: number of images without a prediction.
        least_certain: (index, row), lowest score first.
        errors: the first images without a prediction.
    """

    predicted: "Counter[str]"
    known: "Counter[str]"
    right: "Counter[str]"
    unreadable: int
    least_certain: list[tuple[int, Row]]
    errors: list[Row]

    @property
    def images(self) -> int:
        return self.predicted.total() + self.unreadable

    @property
    def labelled(self) -> int:
        return self.known.total()

    @property
    def accuracy(self) -> float | None:
        return self.right.total() / self.labelled if self.labelled else None

    def __str__(self) -> str:
        parts = [f"{self.images:,} images"]
        if self.accuracy is not None:
            parts.append(f"{self.accuracy:.2%} of the {self.labelled:,} labelled ones predicted correctly")
        if self.unreadable:
            parts.append(f"{self.unreadable:,} could not be read")
        return ", ".join(parts)


def tally(path: Path) -> Tally:
    """Count the rows of a CSV file of predictions by class, and find the least certain and unreadable images.

    `known` and `right` count only rows with a label and a prediction. `least_certain` has at most 24 rows, and `errors`
    at most 20. The file is read row by row, so it need not fit into memory.
    """
    predicted = Counter[str]()
    known = Counter[str]()
    right = Counter[str]()
    unreadable = 0
    for row in read_rows(path):
        if row.error:
            unreadable += 1
        else:
            predicted[row.prediction] += 1
            known.update([row.label] if row.label else [])
            right.update([row.label] if row.label == row.prediction else [])
    scored = ((float(row.score), number, row) for number, row in enumerate(read_rows(path)) if row.score)
    least = [(number, row) for _, number, row in heapq.nsmallest(MOST_PICTURES, scored)]
    errors = [row for row in read_rows(path) if row.error][:MOST_ERRORS]
    return Tally(predicted, known, right, unreadable, least, errors)


def render_results(
    title: str, totals: Tally, images: Sequence[np.ndarray], description: DatasetDescription, options: InferenceOptions
) -> str:
    """Return the HTML page with the results of a prediction, as the content of <body>.

    The page has the counts by class, the least certain images, the first files that could not be read, and the setup.

    Args:
        title: the page's title.
        totals: the counts.
        images: the images of totals.least_certain, (C, H, W) uint8 each.
        description: the dataset that the model was trained on.
        options: the options of the prediction.
    """
    by_class = Section(
        "By class",
        caption="Images by class",
        heads=("Class", "Predicted", "Labelled", "Correct", "Accuracy"),
        lines=[
            _class_line(name, totals) for name in description.classes if totals.predicted[name] or totals.known[name]
        ],
    )
    least_certain = Section(
        "Least certain",
        ["The images whose predicted class has the lowest probability, as the network saw them."],
        pictures=[(picture(image), _words(row)) for image, (_, row) in zip(images, totals.least_certain, strict=True)],
    )
    unreadable = Section(
        "Unreadable files",
        caption=f"The first of {totals.unreadable:,} files that could not be read",
        heads=("File", "Reason"),
        lines=[(row.image, row.error) for row in totals.errors],
    )
    setup = setup_section(
        ("Network", f"{options.model}, trained on {description.name}"),
        ("Shards, batch size", f"{options.shards}, {options.batch_size}"),
    )
    return article(title, str(totals), [by_class, least_certain, *([unreadable] if totals.errors else []), setup])


def _class_line(name: str, totals: Tally) -> tuple[str, ...]:
    known = totals.known[name]
    right = totals.right[name]
    accuracy = f"{right / known:.2%}" if known else "-"
    return name, f"{totals.predicted[name]:,}", f"{known:,}", f"{right:,}", accuracy


def _words(row: Row) -> str:
    truth = f", labelled {row.label}" if row.label and row.label != row.prediction else ""
    return f"{row.image}: {row.prediction} ({float(row.score):.1%}){truth}"
