"""A validation split held out of the training images, so that choices need not be made on the test images."""

from pathlib import Path

import numpy as np

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.data.prepared import open_split, read_description
from flyte_ddp.data.writer import write_prepared
from flyte_ddp.errors import InputError

SHARE = 1 / 12  # of MNIST: 55,000 images to train on, 5,000 to choose by
SEED = 0


def held_out_count(samples: int, share: float = SHARE) -> int:
    """How many of the training images are held out; InputError if that would be none or all of them."""
    count = round(share * samples)
    if not 0 < count < samples:
        raise InputError(f"share must leave an image on either side of {samples}, got {share:g}")
    return count


def held_out(labels: np.ndarray, share: float = SHARE) -> np.ndarray:
    """(N,) bool: which training images are held out, with the classes in proportion. The same on every machine."""
    count = held_out_count(len(labels), share)
    # RandomState is the one generator whose numbers numpy never changes
    shuffled = np.random.RandomState(SEED).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    chosen = np.zeros(len(labels), bool)
    chosen[by_class[np.arange(count) * len(labels) // count]] = True  # evenly spread over the classes
    return chosen


def hold_out(data: Path, directory: Path, share: float = SHARE) -> DatasetDescription:
    """Writes a prepared dataset made from the training images of another one, without any of its test images.

    The held-out images become the new test split; the rest stays the training split, in the same order. Raises
    InputError if either would be empty.
    """
    description = read_description(data)
    images, labels = open_split(data, "train")
    chosen = held_out(labels, share)
    return write_prepared(
        directory,
        f"{description.name}-held-out",
        description.classes,
        images[~chosen],
        labels[~chosen],
        images[chosen],
        labels[chosen],
        description.passes_per_epoch,
    )
