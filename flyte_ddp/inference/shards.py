"""What batch prediction works on: its options, a shard, a rank's job, and the rows that come out. No torch."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence, Tuple

from flyte_ddp.data.prepared import SPLITS
from flyte_ddp.recipes.hyperparameters import DATASETS, MODELS
from flyte_ddp.settings import Settings, setting

MOST_SHARDS = 5000  # Flyte's default limit for one map task


@dataclass(frozen=True)
class InferenceOptions(Settings):
    """What to predict, and how.

    Attributes:
        model: name of the network, see flyte_ddp/recipes/models.py.
        dataset: that the model was trained on, which says shape, classes and normalisation; auto as in training.
        split: of the dataset, where no folder is given.
        shards: parts that are predicted, and retried, each for itself; a shard's images are in memory at once.
        batch_size: images of one forward pass.
        timeout_seconds: how long a shard may go without a batch before it counts as hung.
    """

    model: str = setting("mnist_cnn", choices=MODELS)
    dataset: str = setting("auto", choices=DATASETS)
    split: str = setting("test", choices=SPLITS)
    shards: int = setting(4, minimum=1, maximum=MOST_SHARDS)
    batch_size: int = setting(1000, minimum=1)
    timeout_seconds: float = setting(300.0, minimum=1, maximum=86400)


@dataclass(frozen=True)
class Shard:
    """One part of the images: the cache goes by this alone.

    Attributes:
        number, count: this is shard `number`, from 0, of `count`.
        first, last: its images, the last one not included.
        key: hash of all that decides the predictions: weights, network, images, code.
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
    """One shard, as the rank needs to know it.

    Attributes:
        data: folder of the prepared dataset that the model was trained on.
        files: (name, where it lies) of each image file; empty for images first..last of the dataset's split.
        output: where the rows go.
    """

    model_path: str
    model: str
    data: str
    split: str
    first: int
    last: int
    files: Sequence[Tuple[str, str]]
    batch_size: int
    output: str


@dataclass(frozen=True)
class ModelFile:
    """A file that should hold the weights of a network for such images."""

    path: str
    model: str
    image_shape: Tuple[int, int, int]
    classes: int


class Row(NamedTuple):
    """What is said of one image, as text.

    Attributes:
        image: its place in the split, from 0, or its file below the folder.
        label: the class it is of, empty where not known.
        prediction: the class that the network takes it for.
        score: the probability that the network gives this class.
        error: why there is no prediction.
    """

    image: str
    label: str
    prediction: str
    score: str
    error: str


def write_rows(path: Path, rows: Iterator[Row]) -> None:
    # file names need not be text everywhere
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)


def read_rows(*paths: Path) -> Iterator[Row]:
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            next(lines)
            yield from map(Row._make, lines)
