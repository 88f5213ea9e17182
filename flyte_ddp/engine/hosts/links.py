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


def measure_link_speeds(hosts: Sequence[str], rank: int, device: torch.device) -> tuple[float, float]:
    """Measure how fast this rank sends to the next rank of each of its two rings; a collective.

    The first ring has the ranks of one host. The second has one rank of each host: the first ones, the second ones, and
    so on. Data go in both directions at once, and other ranks exchange at the same time, as in training.

    Args:
        hosts: the host of each rank.
        rank: this rank.
        device: the device that sends and receives. Without the backend nccl, it is the CPU.

    Returns:
        GB/s in one direction, in the host's ring and in the ring of hosts. The first is 0 without the backend nccl.
        Each is 0 if this rank is alone in that ring.
    """
    if distributed.get_backend() != "nccl":
        return 0.0, _measure_speed(rings_of_hosts(hosts), rank, torch.device("cpu"))
    within = _measure_speed([*group_by_host(hosts).values()], rank, device)
    return within, _measure_speed(rings_of_hosts(hosts), rank, device)


def group_by_host(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each host, in order, from the host of each rank."""
    found: dict[str, list[int]] = {host: [] for host in hosts}
    for rank, host in enumerate(hosts):
        found[host].append(rank)
    return found


def rings_of_hosts(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each ring of hosts: first the first rank of each host, then each host's second, and so on.

    Hosts with fewer ranks than others are missing in the last rings, which may have a single rank.
    """
    rings = itertools.zip_longest(*group_by_host(hosts).values())
    return [[rank for rank in ring if rank is not None] for ring in rings]


def slowest_links(hosts: Sequence[str], speeds: Sequence[float]) -> dict[tuple[str, str], float]:
    """Return the slowest speed between each pair of hosts that are neighbours in a ring.

    Args:
        hosts: the host of each rank.
        speeds: for each rank, the GB/s that it has measured to the next rank of its ring, which has a rank of each
            host.

    Returns:
        GB/s by (sending host, receiving host); empty for a single host.
    """
    found: dict[tuple[str, str], float] = {}
    for ring in rings_of_hosts(hosts):
        if len(ring) < 2:  # a host has more ranks than all others
            continue
        for one, other in zip(ring, ring[1:] + ring[:1], strict=True):
            link = hosts[one], hosts[other]
            found[link] = min(found.get(link, speeds[one]), speeds[one])
    return found


def _measure_speed(rings: Sequence[Sequence[int]], rank: int, device: torch.device) -> float:
    """Measure the speed from this rank to the next rank of its ring, in GB/s; a collective of all ranks.

    There are three turns, so that no rank exchanges messages with both neighbours at once. In its turn, a link is used
    ROUNDS times, and the fastest exchange counts. The result is 0 if the rank is alone in its ring.

    Args:
        rings: the ranks of each ring. Each rank is in one ring.
        rank: this rank.
        device: the device that sends and receives.
    """
    if all(len(ring) < 2 for ring in rings):
        return 0.0
    ring = next(ring for ring in rings if rank in ring)
    size = len(ring)
    place = ring.index(rank)
    sent = torch.zeros(BYTES[device.type], dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    seconds = [float("inf")] * 3
    for turn in range(3):
        is_next = _choose_turn(place, size) == turn
        peer = ring[(place + 1) % size] if is_next else ring[place - 1]
        is_idle = size == 1 or not (is_next or _choose_turn((place - 1) % size, size) == turn)
        for _ in range(ROUNDS):
            distributed.barrier()
            started = time.perf_counter()
            if not is_idle:
                for exchange in batch_isend_irecv([P2POp(isend, sent, peer), P2POp(irecv, received, peer)]):
                    exchange.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[turn] = min(seconds[turn], time.perf_counter() - started)
    return sent.nbytes / seconds[_choose_turn(place, size)] / 1e9 if size > 1 else 0.0


def _choose_turn(place: int, size: int) -> int:
    """Return the turn, 0 to 2, in which the link from this place of a ring of this size to the next is measured.

    A rank's two links share what it can send, so they never have the same turn.
    """
    return 2 if size % 2 and place == size - 1 else place % 2
