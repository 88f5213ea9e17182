"""The speed at which ranks exchange data: within a host, and from host to host."""

import itertools
import time
from collections.abc import Sequence

import torch
from torch import distributed
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

GPU_LINK = "GB/s between GPUs of its host"
# The first round opens connections. The shortest of the other rounds is not disturbed by others who use the link.
ROUNDS = 4
# Bytes of a message, by device: they take long enough for a clock, and not too long at 1 Gbit/s
BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}


def link_speeds(hosts: Sequence[str], rank: int, device: torch.device) -> tuple[float, float]:
    """Measure the speed, in both directions at once, between this rank and the next in a ring of ranks.

    All must call it.

    The first ring is that of its host's GPUs. The second has the ranks with the same place on the other hosts. All
    ranks exchange at once, as in training.

    Args:
        hosts: the host of each rank.
        rank: this rank.
        device: the rank's device.

    Returns:
        GB/s in each ring; 0 if there is no such ring.
    """
    if distributed.get_backend() != "nccl":
        return 0.0, _speed(across(hosts), rank, torch.device("cpu"))
    return _speed([*place_ranks(hosts).values()], rank, device), _speed(across(hosts), rank, device)


def place_ranks(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each host."""
    found: dict[str, list[int]] = {host: [] for host in hosts}
    for rank, host in enumerate(hosts):
        found[host].append(rank)
    return found


def across(hosts: Sequence[str]) -> list[list[int]]:
    """Return the first rank of each host, the second of each, and so on."""
    rings = itertools.zip_longest(*place_ranks(hosts).values())
    return [[rank for rank in ring if rank is not None] for ring in rings]


def between_hosts(hosts: Sequence[str], speeds: Sequence[float]) -> dict[tuple[str, str], float]:
    """Return the slowest speed measured between each pair of neighbouring hosts, in GB/s, by (from, to).

    Args:
        hosts: the host of each rank.
        speeds: GB/s from each rank to the next of its ring; the n-th ranks of all hosts are a ring.
    """
    found: dict[tuple[str, str], float] = {}
    for ring in across(hosts):
        if len(ring) < 2:  # a host has more ranks than all others
            continue
        for one, other in zip(ring, ring[1:] + ring[:1], strict=True):
            link = hosts[one], hosts[other]
            found[link] = min(found.get(link, speeds[one]), speeds[one])
    return found


def _speed(rings: Sequence[Sequence[int]], rank: int, device: torch.device) -> float:
    if all(len(ring) < 2 for ring in rings):
        return 0.0
    ring = next(ring for ring in rings if rank in ring)
    size = len(ring)
    at = ring.index(rank)
    sent = torch.zeros(BYTES[device.type], dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    seconds = [float("inf")] * 3
    for turn in range(3):
        is_next = _choose_turn(at, size) == turn
        peer = ring[(at + 1) % size] if is_next else ring[at - 1]
        is_idle = size == 1 or not (is_next or _choose_turn((at - 1) % size, size) == turn)
        for _ in range(ROUNDS):
            distributed.barrier()
            started = time.perf_counter()
            if not is_idle:
                for exchange in batch_isend_irecv([P2POp(isend, sent, peer), P2POp(irecv, received, peer)]):
                    exchange.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[turn] = min(seconds[turn], time.perf_counter() - started)
    return sent.nbytes / seconds[_choose_turn(at, size)] / 1e9 if size > 1 else 0.0


def _choose_turn(place: int, size: int) -> int:
    """Return the turn in which the link from this place of a ring to the next is measured.

    A rank's two links share what it can send, so they never have the same turn.
    """
    return 2 if size % 2 and place == size - 1 else place % 2
