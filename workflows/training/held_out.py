"""A validation split, held out of the training images: what is chosen by it has not seen the test images."""

from pathlib import Path

import numpy as np

from workflows.training.description import DatasetDescription
from workflows.training.errors import InputError
from workflows.training.prepared import open_split, read_description, write_prepared

SHARE = 1 / 12  # of MNIST: 55,000 images to train on, 5,000 to choose by
SEED = 0


def hold_out(data: Path, directory: Path, share: float = SHARE) -> DatasetDescription:
    """Writes a prepared dataset of the training images of another one, whose test images it leaves out altogether.

    A share of them, above 0 and below 1, becomes the new test split, with the classes in the same proportions; the
    rest stays the training split, in its order. The same images on every machine. InputError if a split would be empty.
    """
    description = read_description(data)
    images, labels = open_split(data, "train")
    count = round(share * len(labels))
    if not 0 < count < len(labels):
        raise InputError(
            f"{description.name}: share must leave an image on either side of {len(labels)}, got {share:g}"
        )
    shuffled = np.random.RandomState(SEED).permutation(
        len(labels)
    )  # the one generator whose numbers numpy never changes
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    held_out = np.zeros(len(labels), bool)
    held_out[by_class[np.arange(count) * len(labels) // count]] = True  # evenly spread over the classes
    return write_prepared(
        directory,
        f"{description.name}-held-out",
        description.classes,
        images[~held_out],
        labels[~held_out],
        images[held_out],
        labels[held_out],
        description.passes_per_epoch,
    )
