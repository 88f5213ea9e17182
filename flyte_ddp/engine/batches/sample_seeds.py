"""What a Dataset draws from the global generators of torch, NumPy and Python: for each sample, numbers of its own.

They follow from where in the training the sample is read, so it does not matter which rank or loader worker reads it.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np
import torch

from flyte_ddp.random_numbers import Use, key_of

# A key of the epoch, and the position in it of the first of some samples that come one after the other; None is an
# evaluation, in which a sample has the same numbers each time.
Origin = tuple[int, int] | None
NOWHERE: Iterable[Origin] = repeat(None)  # for any number of parts


def sample_keys(indices: np.ndarray, origin: Origin) -> list[int]:
    """For each sample: another one in each pass over the data. 2 µs each."""
    if origin is None:
        return [key_of(Use.TEST_SAMPLE, int(index)) for index in indices]
    key, first = origin
    return [key_of(Use.SAMPLE, key, first + row) for row in range(len(indices))]


def seed_generators(key: int) -> None:
    """7 µs, where torch.manual_seed, which looks for devices, would take 200. torch and NumPy have the same algorithm,
    which takes 32 bits, so they get other halves of the key.
    """
    torch.default_generator.manual_seed(key)
    np.random.seed(key >> 32)
    random.seed(key)


class SeededIndices:
    """Indices on their way to a DataLoader's worker, which seeds its generators as it takes them from its queue."""

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
    """After the block the generators go on as if nothing had been drawn in it; 0.1 ms."""
    states = torch.default_generator.get_state(), np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
