"""A random order that is computed for the positions at hand, so that nobody needs a list of all samples."""

import numpy as np
import torch
from torch import Tensor

ROUNDS = 8


def shuffled(positions: Tensor, size: int | np.ndarray, key: int | np.ndarray) -> Tensor:
    """Return which numbers are at these positions of a random permutation of range(size), without making all of it.

    A Feistel network permutes the numbers of as many bits as size has. A number that leads out of range(size) is
    permuted again until it does not (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).

    Args:
        positions: (n,) int64 on the CPU, each below its size.
        size: the size, or (n,) the size of each position's permutation.
        key: the key, which chooses the permutation, or (n,) the key of each position's permutation.

    Returns:
        (n,) int64.
    """
    sizes = np.atleast_1d(np.asarray(size, np.uint64))
    keys = np.atleast_1d(np.asarray(key, np.uint64))
    samples = _permute(positions.numpy().astype(np.uint64), sizes, keys)
    outside = np.flatnonzero(samples >= sizes)
    while len(outside):
        sizes_outside, keys_outside = (each if len(each) == 1 else each[outside] for each in (sizes, keys))
        samples[outside] = _permute(samples[outside], sizes_outside, keys_outside)
        outside = outside[samples[outside] >= sizes_outside]
    return torch.from_numpy(samples.astype(np.int64))


def _permute(numbers: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Permute the numbers below 2**b with a Feistel network; b is the bit length of size - 1, but at least 2.

    In each round a half of the bits is changed by a mix of the other half and the key. With the same size and key,
    different numbers give different results. A result may be `size` or more: the caller must permute it again.

    Args:
        numbers: (n,) uint64, the numbers.
        sizes: (1,) or (n,) uint64, the size for each number.
        keys: (1,) or (n,) uint64, the key for each number.

    Returns:
        (n,) uint64.
    """
    bits = np.maximum(2, np.frexp((sizes - np.uint64(1)).astype(np.float64))[1]).astype(np.uint64)
    low_bits = bits // np.uint64(2)
    one = np.uint64(1)
    low_mask = (one << low_bits) - one
    high_mask = (one << bits - low_bits) - one
    low = numbers & low_mask
    high = numbers >> low_bits
    for number in range(0, ROUNDS, 2):
        low ^= _mix(high, keys, number) & low_mask
        high ^= _mix(low, keys, number + 1) & high_mask
    return high << low_bits | low


def _mix(numbers: np.ndarray, keys: np.ndarray, round_number: int) -> np.ndarray:
    """Return 32 pseudorandom bits for each number, its key and the round, by SplitMix64's finalizer, as uint64.

    They are the highest bits of the finalizer's 64, which are its best ones.
    """
    mixed = numbers + (keys + np.uint64(round_number * 0x9E3779B97F4A7C15 % (1 << 64)))
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)
