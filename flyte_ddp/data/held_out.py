"""The autoencoder's validation split, which is held out of the training images here: Lightning lacks the engine's."""

import numpy as np

from flyte_ddp.errors import InputError

FRACTION = 1 / 12  # leaves 55,000 of MNIST's images to train on, and 5,000 to choose by
SEED = 0


def held_out_count(samples: int, fraction: float = FRACTION) -> int:
    """Return how many of the training images are held out. Raises InputError if that would be none or all of them."""
    count = round(fraction * samples)
    if not 0 < count < samples:
        raise InputError(f"fraction must leave an image on either side of {samples}, got {fraction:g}")
    return count


def held_out(labels: np.ndarray, fraction: float = FRACTION) -> np.ndarray:
    """Return which training images are held out: (N,) bool, the same on every machine.

    The classes are held out in proportion.
    """
    count = held_out_count(len(labels), fraction)
    # RandomState is the one generator whose numbers numpy never changes
    shuffled = np.random.RandomState(SEED).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    chosen = np.zeros(len(labels), bool)
    chosen[by_class[np.arange(count) * len(labels) // count]] = True  # these are evenly spread over the classes
    return chosen
