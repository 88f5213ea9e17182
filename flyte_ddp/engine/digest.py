"""The digest of a network's weights: 16 hex digits by which two people tell whether they have the same bits.

Each tensor gives a whole number, modulo 2^64: the sum of (32 bits of it + random key of their position) squared, as in
square hashing (Etzel, Patel and Ramzan, CRYPTO 1999). So each rank adds up the rows that it has, wherever they are cut,
and no tensor is gathered or leaves its GPU. It tells of chance, not of malice: it is no signature.

100 million float32 numbers take about as long as SHA-256 of them would: 0.9 s on one core of a busy server.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.sharding.sharded_state import Shard, cut, with_room
from flyte_ddp.model_files.weights import first_names
from flyte_ddp.random_numbers import split_mix
from flyte_ddp.recipe import CPU

WORDS = {1: torch.int8, 2: torch.int16}  # of 32 bits otherwise: with 64, the square would lose the sign
KEYS = 1 << 14  # they recur, times an odd factor of their own; a CPU's cache has room for so many
AT_ONCE = 64  # so many times as many on a GPU


@torch.no_grad()
def weights_digest(weights: Mapping[str, Tensor | Shard], base_digest: str = "", device: torch.device = CPU) -> str:
    """Compute a digest of the names, dtypes, shapes and bits of weights; a collective if there is a process group.

    All ranks get the same digest, that of rank 0's whole weights and of all ranks' rows of sharded weights. A network
    has the same digest whole and sharded. The bits of tied weights count once.

    Args:
        weights: the weights by name. A sharded weight is a Shard with this rank's rows.
        base_digest: the digest of the frozen weights that `weights` leaves out; "" if there are none.
        device: where the collective's tensors are.

    Returns:
        16 hex digits.
    """
    rooms = with_room(weights)
    firsts = first_names(rooms)
    sums = [_compute_own_sum(value).to(device) for name, value in weights.items() if firsts[name] == name]
    total = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)
    if distributed.is_initialized():
        distributed.all_reduce(total)
    sum_of = dict(zip((name for name in firsts if firsts[name] == name), total.tolist(), strict=True))
    lines = [f"{name}\0{value.dtype}\0{tuple(value.shape)}\0{sum_of[firsts[name]]}\n" for name, value in rooms.items()]
    return hashlib.sha256("".join([*lines, base_digest]).encode()).hexdigest()[:16]


def _compute_own_sum(value: Tensor | Shard) -> Tensor:
    """Return what this rank adds to one tensor's checksum, so that the ranks together count each number once.

    Args:
        value: a whole tensor, which only rank 0 counts; or a Shard, this rank's rows of a sharded tensor. If several
            ranks have the same rows, only the one that writes checkpoints counts them.

    Returns:
        () int64, modulo 2^64: the checksum of the numbers that this rank counts; 0 if it counts none.
    """
    if isinstance(value, Shard):
        rows = value.rows
        first = cut().rows(value.shape[0])[0] * math.prod(value.shape[1:])
        is_counted = cut().writes
    else:
        rows = value
        first = 0
        is_counted = not distributed.is_initialized() or distributed.get_rank() == 0
    return compute_sum(rows, first) if is_counted else torch.zeros((), dtype=torch.int64, device=rows.device)


def compute_sum(numbers: Tensor, first: int = 0) -> Tensor:
    """Compute a checksum of a tensor's bits, or of a part of them; the parts' checksums add up to the tensor's.

    The checksum depends on the position of each number in the tensor.

    Args:
        numbers: the numbers of the tensor, or of the part, in order.
        first: the index in the whole tensor of the first of these numbers.

    Returns:
        () int64, modulo 2^64, on the tensor's device.
    """
    words = numbers.resolve_conj().resolve_neg().contiguous().view(-1).view(WORDS.get(numbers.itemsize, torch.int32))
    first *= max(1, numbers.itemsize // 4)
    keys = split_mix(0, 0, KEYS, numbers.device)
    total = torch.zeros((), dtype=torch.int64, device=numbers.device)
    factors = split_mix(1, first // KEYS, len(words) // KEYS + 2, numbers.device).bitwise_or_(1).unsqueeze(1)
    most = 1 if numbers.device.type == "cpu" else AT_ONCE
    done = row = 0
    while done < len(words):
        start = (first + done) % KEYS
        rows = min(most, (len(words) - done) // KEYS) if start == 0 else 0
        stop = done + (rows * KEYS or min(KEYS - start, len(words) - done))
        chunk = words[done:stop].view(max(1, rows), -1)
        mixed = (keys[start : start + chunk.shape[1]] * factors[row : row + len(chunk)]).add_(chunk)
        total += mixed.mul_(mixed).sum()
        done = stop
        row = row + len(chunk)
    return total


def sum_bits(numbers: Tensor) -> Tensor:
    """Return a fast checksum of a tensor's bits, () int64: the sum of its words of 64 bits, modulo 2^64.

    It does not change if two words are exchanged. compute_sum() notices that, but takes fifty times as long.
    """
    bits = numbers.detach().contiguous().view(-1).view(torch.uint8)
    bits = bits.clone() if bits.storage_offset() % 8 else bits
    end = len(bits) // 8 * 8
    return bits[:end].view(torch.int64).sum() + bits[end:].sum()


@torch.no_grad()
def sum_of_all(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a checksum of the bits of all tensors and of their order, on this rank alone: () int64, modulo 2^64."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return sum((compute_sum(one).to(device) * (2 * number + 1) for number, one in enumerate(tensors)), zero)


def differ_between_ranks(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Return whether the bits of the tensors differ between any two ranks; a collective.

    All ranks get the same answer.

    Args:
        tensors: this rank's tensors, in the same order on all ranks. A tensor that is given twice counts once.
        device: where the collective's tensors are.
    """
    own = sum_of_all({id(one): one for one in tensors}.values(), device)
    extremes = torch.stack([own, ~own])  # the least of all is the other way up
    distributed.all_reduce(extremes, distributed.ReduceOp.MAX)
    return bool(extremes[0] != ~extremes[1])
