"""Random numbers by position: elements first, first + 1, … of the stream of a key, without drawing those before them.

So a rank draws for its own samples alone, and what it draws does not depend on how many ranks there are. On a CPU the
streams are PCG64DXSM's, which numpy can advance to any position in microseconds and whose bits it guarantees; elsewhere
they are SplitMix64's (Steele, Lea and Flood, OOPSLA 2014), a function of the position by itself.
"""

import hashlib
import math
from collections.abc import Callable
from enum import Enum
from functools import cache, partial

import torch
from numpy.random import PCG64DXSM
from torch import Tensor

Number = int | Tensor  # a () int64 where torch compiles: what is compiled serves for all keys, and for all positions
INCREMENT = 0x9E3779B97F4A7C15  # of SplitMix64; then what the bits are shifted and multiplied by
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


class Use(Enum):
    """What a key is for: no two uses have the same keys, whatever their positions. Of up to 16 bytes."""

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
    OWN_STEP = b"own step"
    AUDIT = b"audit"


def key_of(use: Use, *position: int) -> int:
    """A key (64 bits) for one position of a training, such as seed, epoch and step, from 0 to 2^64 - 1 each; 2 µs."""
    content = b"".join(number.to_bytes(8, "little") for number in position)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=use.value).digest(), "little")


def words(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """(count,) int64: 64 random bits each."""
    if device.type == "cpu" and count:  # torch cannot see an empty buffer
        return torch.frombuffer(PCG64DXSM(key).advance(first).random_raw(count), dtype=torch.int64)
    return split_mix(key, first, count, device)


def split_mix(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """(count,) int64: SplitMix64's words in torch's integer operations, which wrap around and shift in the sign."""
    return _mixed(torch.arange(first + 1, first + count + 1, device=device), signed(key))


def _mixed(places: Tensor, key: Number) -> Tensor:
    """SplitMix64's words at these places of a stream, from 1."""
    values = places.mul_(signed(INCREMENT)).add_(key)
    for shift, factor in ROUNDS:
        values = values.bitwise_xor_(values >> shift & (1 << 64 - shift) - 1).mul_(signed(factor))
    return values.bitwise_xor_(values >> LAST_SHIFT & (1 << 64 - LAST_SHIFT) - 1)


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def uniform(key: Number, first: Number, count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """(count,) of the dtype, at least 0 and below 1, a multiple of 2^-24, or of what the dtype can tell apart."""
    digits = min(24, round(1 - math.log2(torch.finfo(dtype).eps)))
    bits = _pieces(key, first, count, device, torch.int32).bitwise_and_((1 << digits) - 1)
    return bits.to(dtype).mul_(2.0**-digits)


def normal(key: Number, first: Number, count: int, device: torch.device) -> Tensor:
    """(count,) float32 of mean 0 and standard deviation 1, at most 5.8 from 0 (Box and Muller, 1958)."""
    radius, angle = uniform(key, 2 * first, 2 * count, device).view(-1, 2).unbind(1)
    return torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * math.pi * angle)


def integers(key: Number, first: Number, count: int, device: torch.device, low: int, high: int) -> Tensor:
    """(count,) int64, from low to high - 1."""
    return _pieces(key, first, count, device, torch.int64).bitwise_and_((1 << 63) - 1).remainder_(high - low).add_(low)


def kept(key: Number, first: Number, count: int, device: torch.device, p: float) -> Tensor:
    """(count,) bool: False with probability p, to the nearest multiple of 2^-16."""
    threshold = threshold_of(p)[0]
    if threshold == 1 << 16:  # which an int16 could not be compared with
        return torch.zeros(count, dtype=torch.bool, device=device)
    return _pieces(key, first, count, device, torch.int16) >= threshold - (1 << 15)


def threshold_of(p: float) -> tuple[int, float]:
    """Of 2^16 equally likely numbers, how many mean a zero; and what dropout multiplies the rest by."""
    threshold = round(p * (1 << 16))
    return threshold, (1 << 16) / ((1 << 16) - threshold) if threshold < 1 << 16 else 0.0


def _pieces(key: Number, first: Number, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(count,) of an integer type; of a shorter one, several come from a word."""
    if isinstance(key, Tensor) or isinstance(first, Tensor):
        compiled = _by_numpy() if device.type == "cpu" else partial(_one_by_one, device)
        return compiled(key, first, count, dtype)
    each = 8 // dtype.itemsize
    start, stop = first // each, -(-(first + count) // each)
    return words(key, start, stop - start, device).view(dtype)[first - start * each :][:count]


def _one_by_one(device: torch.device, key: Tensor, first: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Pieces of SplitMix64's words, each computed by itself: so torch compiles them into the kernel that needs them."""
    elements, size = torch.arange(count, device=device) + first, dtype.itemsize
    shift = (8 // size).bit_length() - 1
    return (_mixed((elements >> shift) + 1, key) >> (elements & (1 << shift) - 1) * 8 * size).to(dtype)


@cache
def _by_numpy() -> Callable[..., Tensor]:
    """What computes them on a CPU, as an operation that torch's compiler calls."""

    @torch.library.custom_op("flyte_ddp::numbers", mutates_args=())
    def numbers(key: Tensor, first: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return _pieces(int(key), int(first), count, torch.device("cpu"), dtype).clone()

    @numbers.register_fake
    def _(key: Tensor, first: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)

    return numbers
