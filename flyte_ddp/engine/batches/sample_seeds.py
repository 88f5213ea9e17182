"""The random numbers that a Dataset draws from the global generators of torch, NumPy and Python, by sample.

They depend on where in the training the sample is read, so it does not matter which rank or loader worker reads it.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np
import torch

from flyte_ddp.random_numbers import Use, derive_key

# The epoch's key, and the position in the epoch of the first of some successive samples. None is an evaluation, in
# which a sample has the same numbers each time.
Origin = tuple[int, int] | None
NOWHERE: Iterable[Origin] = repeat(None)  # the origins of any number of parts in an evaluation


def sample_keys(indices: np.ndarray, origin: Origin) -> list[int]:
    """Return for each sample the key that seeds the random generators for the sample, in 2 µs each.

    Args:
        indices: (n,) the indices of the samples, which are successive samples of an epoch.
        origin: in a training, the epoch's key and the position of the first of these samples in the epoch. A sample's
            key follows from the epoch's key and the sample's own position. In an evaluation None: a sample's key
            follows from its index alone.
    """
    if origin is None:
        return [derive_key(Use.TEST_SAMPLE, int(index)) for index in indices]
    key, first = origin
    return [derive_key(Use.SAMPLE, key, first + row) for row in range(len(indices))]


def seed_generators(key: int) -> None:
    """Seed the global generators of torch on the CPU, NumPy and Python with a key of 64 bits, in 7 µs.

    NumPy's and torch's generators take 32 bits: NumPy gets the key's upper half, and torch the lower half.
    """
    # torch.manual_seed() looks for devices, and would take 200 µs
    torch.default_generator.manual_seed(key)
    np.random.seed(key >> 32)
    random.seed(key)


class SeededIndices:
    """Indices on their way to a DataLoader's worker. It seeds its generators as it takes them from its queue."""

    def __init__(self, indices: Any, key: int):
        self._indices = indices
        self._key = key

    def __reduce__(self) -> Any:
        return _taken, (self._indices, self._key)


def _taken(indices: Any, key: int) -> Any:
    seed_generators(key)
    return indices


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the global generators of torch on the CPU, NumPy and Python after the block; a context manager."""
    states = torch.default_generator.get_state(), np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
