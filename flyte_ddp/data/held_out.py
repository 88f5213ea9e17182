"""The autoencoder's validation split: training images held out, since Lightning knows nothing of the engine's own."""

import numpy as np

from flyte_ddp.errors import InputError

FRACTION = 1 / 12  # of MNIST: 55,000 images to train on, 5,000 to choose by
SEED = 0


def held_out_count(samples: int, fraction: float = FRACTION) -> int:
    """How many of the training images are held out; InputError if that would be none or all of them."""
    count = round(fraction * samples)
    if not 0 < count < samples:
        raise InputError(f"fraction must leave an image on either side of {samples}, got {fraction:g}")
    return count


def held_out(labels: np.ndarray, fraction: float = FRACTION) -> np.ndarray:
    """(N,) bool: which training images are held out, with the classes in proportion. The same on every machine."""
    count = held_out_count(len(labels), fraction)
    # RandomState is the one generator whose numbers numpy never changes
    shuffled = np.random.RandomState(SEED).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    chosen = np.zeros(len(labels), bool)
    chosen[by_class[np.arange(count) * len(labels) // count]] = True  # evenly spread over the classes
    return chosen
