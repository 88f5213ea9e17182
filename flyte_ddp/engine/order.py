"""A random order that is computed for the positions at hand, so that nobody needs a list of all samples."""

import numpy as np
import torch
from torch import Tensor

ROUNDS = 8


def shuffled(positions: Tensor, size: int, key: int) -> Tensor:
    """The samples (n,) int64 at these positions (n,) of a random order of range(size); each key has its own.

    A Feistel network permutes the numbers of as many bits as size has; one that leads out of range(size) is permuted
    again until it does not (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
    """
    found = _permuted(positions.numpy().astype(np.uint64), size, key)
    outside = np.flatnonzero(found >= size)
    while len(outside):
        found[outside] = _permuted(found[outside], size, key)
        outside = outside[found[outside] >= size]
    return torch.from_numpy(found.astype(np.int64))


def _permuted(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """A permutation of the numbers of as many bits as size has, whose halves change one another in turn."""
    bits = max(2, (size - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    low, high = numbers & low_mask, numbers >> low_bits
    for number in range(0, ROUNDS, 2):
        low ^= _mixed(high, key, number) & low_mask
        high ^= _mixed(low, key, number + 1) & high_mask
    return high << low_bits | low


def _mixed(numbers: np.ndarray, key: int, number: int) -> np.ndarray:
    """The finalizer of SplitMix64, of which the highest bits are the best, for each number, key and round."""
    mixed = numbers + np.uint64((key + number * 0x9E3779B97F4A7C15) % (1 << 64))
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)
