"""Random numbers by position: any range of a key's stream, without drawing the numbers before it.

A rank draws for its own samples alone, and a sample gets the same numbers on any number of ranks. On a CPU the streams
are PCG64DXSM's, which numpy can advance to any position in microseconds and whose bits numpy guarantees. Elsewhere they
are SplitMix64's (Steele, Lea and Flood, OOPSLA 2014), which computes each number from its position.
"""

import hashlib
import math
from enum import Enum

import torch
from numpy.random import PCG64DXSM
from torch import Tensor

# The constants of SplitMix64: its increment, the shift and factor of each round, and the last shift
INCREMENT = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


class Use(Enum):
    """The purpose of a key. Two purposes never share a key, whatever their positions. A value has at most 16 bytes."""

    HELD_OUT = b"held out"
    PASS = b"pass"
    BLOCKS = b"blocks"
    BLOCK_WINDOW = b"block window"
    LENGTHS = b"lengths"
    LENGTH_WINDOW = b"length window"
    AUGMENTATION = b"augmentation"
    CALL = b"call"
    STEP = b"step"
    PART = b"part"
    TEST_ORDER = b"test order"
    TEST_STEP = b"test step"
    SAMPLE = b"sample"
    TEST_SAMPLE = b"test sample"
    LIGHTNING = b"lightning"
    LIGHTNING_ORDER = b"lightning order"
    LIGHTNING_BATCH = b"lightning batch"
    OWN_STEP = b"own step"
    AUDIT = b"audit"


def derive_key(use: Use, *position: int) -> int:
    """Return the 64-bit key of the random numbers for one purpose at one position of a training.

    Args:
        use: the purpose.
        position: numbers such as seed, epoch and step, each from 0 to 2^64 - 1.
    """
    content = b"".join(number.to_bytes(8, "little") for number in position)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=use.value).digest(), "little")


def words(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the words at positions first, first + 1, … of a key's random stream: (count,) int64, 64 random bits each.

    Positions count from 0. A key's stream on a CPU is not its stream on other devices.
    """
    if device.type == "cpu" and count:  # torch cannot see an empty buffer
        return torch.frombuffer(PCG64DXSM(key).advance(first).random_raw(count), dtype=torch.int64)
    return split_mix(key, first, count, device)


def split_mix(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return words of SplitMix64 as (count,) int64, with 64 random bits each, computed on the device.

    Args:
        key: the seed, 64 bits.
        first: the position of the first word, from 0.
        count: how many words to return.
        device: where to compute.
    """
    # Torch's int64 wraps around, as the algorithm needs. Torch shifts in the sign, so the sign is masked out.
    values = torch.arange(first + 1, first + count + 1, device=device).mul_(signed(INCREMENT)).add_(signed(key))
    for shift, factor in ROUNDS:
        values = values.bitwise_xor_(values >> shift & (1 << 64 - shift) - 1).mul_(signed(factor))
    return values.bitwise_xor_(values >> LAST_SHIFT & (1 << 64 - LAST_SHIFT) - 1)


def signed(word: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit word."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def uniform(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the uniform numbers at positions first, first + 1, … of a key's random stream: (count,) float32.

    The numbers are multiples of 2^-24, at least 0 and below 1. Positions count from 0.
    """
    # Each word gives two numbers
    start = first // 2
    stop = -(-(first + count) // 2)
    halves = words(key, start, stop - start, device).view(torch.int32)[first - 2 * start :][:count]
    return halves.bitwise_and_((1 << 24) - 1).to(torch.float32).mul_(2.0**-24)


def normal(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the numbers first, first + 1, … of the key's stream: (count,) float32, normally distributed.

    Their mean is 0 and their standard deviation 1. None is farther than 5.8 from 0 (Box and Muller, 1958).
    """
    radius, angle = uniform(key, 2 * first, 2 * count, device).view(-1, 2).unbind(1)
    return torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * math.pi * angle)


def integers(key: int, first: int, count: int, device: torch.device, low: int, high: int) -> Tensor:
    """Return the numbers first, first + 1, … of the key's stream: (count,) int64, from low to high - 1."""
    return words(key, first, count, device).bitwise_and_((1 << 63) - 1).remainder_(high - low).add_(low)
