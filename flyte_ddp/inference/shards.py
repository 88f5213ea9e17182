"""The options of batch prediction, its shards, a rank's job, and the rows it writes. No torch."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flyte_ddp.data.prepared.prepared import SPLITS
from flyte_ddp.fields import Settings, setting
from flyte_ddp.recipes.hyperparameters import DATASETS, MODELS

FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
MOST_SHARDS = 5000  # Flyte's default limit for one map task


@dataclass(frozen=True)
class InferenceOptions(Settings):
    """The options of batch prediction."""

    model: str = setting(
        "auto",
        choices=("auto", *MODELS),
        help="name of the network; flyte_ddp/recipes/models.py has them; auto is as in the metadata of the weights, "
        "else mnist_cnn.",
    )
    dataset: str = setting(
        "auto",
        choices=DATASETS,
        help="the dataset that the model was trained on, which determines shape, classes and normalisation; auto is as "
        "in the weights' metadata, else as in training.",
    )
    split: str = setting("test", choices=SPLITS, help="the split of the dataset to predict if no folder is given.")
    shards: int = setting(
        4,
        minimum=1,
        maximum=MOST_SHARDS,
        help="number of parts, each predicted and retried on its own, with all of its images in memory.",
    )
    batch_size: int = setting(1000, minimum=1, help="images per forward pass.")
    timeout_seconds: float = setting(
        300.0, minimum=1, maximum=86400, help="how long a shard may go without a batch before it counts as hung."
    )


@dataclass(frozen=True)
class Shard:
    """A part of the images. The shard alone is the cache key.

    Attributes:
        number, count: this is shard `number`, from 0, of `count`.
        first, last: the range of its images, the last one not included.
        key: hash of everything that determines the predictions: weights, network, images, code.
    """

    number: int
    count: int
    first: int
    last: int
    key: str

    @property
    def name(self) -> str:
        return f"Shard {self.number + 1} of {self.count}"


@dataclass(frozen=True)
class ShardJob:
    """A shard, as a rank's job.

    Attributes:
        data: folder of the prepared dataset that the model was trained on.
        files: (name, path) of each image file; empty for images of the dataset's split.
        output: file for the rows.
    """

    shard: Shard
    options: InferenceOptions
    model_path: str
    data: str
    files: Sequence[tuple[str, str]]
    output: str


class Row(NamedTuple):
    """The result for one image, as text.

    In a file, an apostrophe precedes text that a spreadsheet would take for a formula.

    Attributes:
        image: the image's index in the split, from 0, or its path below the folder.
        label: the image's class, empty if unknown.
        prediction: the predicted class.
        score: the predicted probability of this class.
        error: why there is no prediction.
    """

    image: str
    label: str
    prediction: str
    score: str
    error: str


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    # Names of files may be invalid Unicode
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(map(_quoted, rows))


def read_rows(*paths: Path) -> Iterator[Row]:
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            next(lines)
            yield from map(_unquoted, lines)


def _quoted(row: Row) -> Row:
    """Put an apostrophe before text that a spreadsheet would take for a formula: anybody may have named the files."""
    return Row._make(f"'{cell}" if cell.startswith(FORMULA) else cell for cell in row)


def _unquoted(cells: Sequence[str]) -> Row:
    return Row._make(cell[1:] if cell.startswith("'") else cell for cell in cells)
