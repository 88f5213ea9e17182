"""The oddities of some of the hosts, GPUs and links of a training."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from flyte_ddp.engine.hosts.links import GPU_LINK, slowest_links
from flyte_ddp.engine.hosts.places import Place
from flyte_ddp.errors import RecoverableError
from flyte_ddp.settings import RunOptions
from flyte_ddp.text import listed

# A link is slow below this share of the best link's speed: two hosts may be farther from one another than two others.
# Without GPUs, processes that share cores take turns: eight on two busy cores had a fifth of the best speed.
SLOW_LINK, SLOW_LINK_OF_CPUS = 0.5, 0.1
CLOCK_SECONDS = 5.0  # storages refuse requests of the wrong time after minutes


def name_rank(rank: int, place: Place) -> str:
    """Return a rank's number with its host and device, for messages."""
    return f"rank {rank} on {place.host} ({place.device})"


def name_host(rank: int, place: Place) -> str:
    return place.host


# The owner of each figure in messages, and the share of the median below which the figure is odd
FIGURES: dict[str, tuple[Callable[[int, Place], str], float]] = {
    "GiB of memory": (name_host, 0.8),
    "GiB of /dev/shm": (name_host, 0.8),
    "free GiB of GPU memory": (name_rank, 0.8),
    "TFLOPS": (name_rank, 0.8),
    GPU_LINK: (name_rank, SLOW_LINK),
}


def list_oddities(places: Sequence[Place], options: RunOptions) -> list[str]:
    """Return a sentence on each thing that is odd about the hosts; an empty list if nothing is.

    Odd are differences between hosts, GPUs or links, wrong products of matrices, GPUs that slow themselves down, and
    disks with too little room.

    Args:
        places: what measure_places() has returned. All ranks have the same, so all return or raise the same.
        options: the options. With odd_hosts "refuse", any such sentence becomes an error.

    Raises:
        RecoverableError: There is a sentence, and options.odd_hosts is "refuse". Its bad_hosts are those of
            list_bad_hosts().
    """
    odd = [*_other_facts(places), *_low_figures(places), *_slow_links(places), *_other_clocks(places)]
    advised = [f"{reason}: an odd host may fail, or be slow; give the training hosts alike" for reason in odd]
    reasons = [*advised, *_wrong_gpus(places), *_slow_gpus(places), *_full_disks(places)]
    if reasons and options.odd_hosts == "refuse":
        message = f"refused before the first step, as odd_hosts says: {'; '.join(reasons)}"
        raise RecoverableError(message, list_bad_hosts(places))
    return reasons


def list_bad_hosts(places: Sequence[Place]) -> list[str]:
    """Return the hosts whose own hardware is odd, each once.

    A host is odd if one of FIGURES is far below the median: its memory or /dev/shm, a GPU's free memory or speed, or a
    link between GPUs of the host. It is odd, too, if a GPU's matrix product differs from that of most GPUs of its kind,
    or if a GPU slows itself down. Differing versions, clocks, links between hosts and free disk space do not count.
    """
    ranks = [rank for rank, place in enumerate(places) if place.slow_by]
    for name in FIGURES:
        ranks += _find_low(places, name)[0].values()
    for odd, others in find_wrong_products(places, [place.product for place in places]):
        ranks += odd if others else []
    return list(dict.fromkeys(places[rank].host for rank in ranks))


def _other_facts(places: Sequence[Place]) -> Iterator[str]:
    """Yield a clause on each of the places' facts, such as a version, that differs between hosts.

    A clause names the hosts whose value is not the most frequent one: "NAME differ between hosts: HOST has VALUE,
    others VALUE". If a host has several places, the facts of its first one count. A fact that a host lacks has the
    value "none" there.
    """
    facts = {place.host: place.facts for place in reversed(places)}
    hosts = list(dict.fromkeys(place.host for place in places))
    for name in dict.fromkeys(chain.from_iterable(facts.values())):
        values = {host: facts[host].get(name, "none") for host in hosts}
        most, _ = Counter(values.values()).most_common(1)[0]
        odd = [f"{host} has {value}" for host, value in values.items() if value != most]
        if odd:
            yield f"{name} differ between hosts: {listed(odd)}, others {most}"


def _low_figures(places: Sequence[Place]) -> Iterator[str]:
    for name in FIGURES:
        low, usual = _find_low(places, name)
        if low:
            said = [f"{one} has {places[rank].figures[name]:.3g}" for one, rank in low.items()]
            yield f"{name} differ: {listed(said)}, the median {usual:.3g}"


def _find_low(places: Sequence[Place], name: str) -> tuple[dict[str, int], float]:
    """Return a rank of each owner whose figure of this name is far below the median, by owner, and the median."""
    owner, share = FIGURES[name]
    ranks = {owner(rank, place): rank for rank, place in enumerate(places) if name in place.figures}
    usual = statistics.median(places[rank].figures[name] for rank in ranks.values()) if ranks else 0.0
    return {one: rank for one, rank in ranks.items() if places[rank].figures[name] < share * usual}, usual


def _slow_links(places: Sequence[Place]) -> Iterator[str]:
    speeds = slowest_links([place.host for place in places], [place.link for place in places])
    best = max(speeds.values(), default=0.0)  # the median would not do: one slow host of three makes two links slow
    share = SLOW_LINK if any(place.product for place in places) else SLOW_LINK_OF_CPUS
    slow = [f"{speed:.3g} from {one} to {other}" for (one, other), speed in speeds.items() if speed < share * best]
    if slow:
        yield f"GB/s between hosts differ, and all wait for the slowest: {listed(slow)}, the best {best:.3g}"


def _other_clocks(places: Sequence[Place]) -> Iterator[str]:
    clocks = {place.host: place.clock for place in places}
    usual = statistics.median_low(clocks.values())
    off = {host: clock - usual for host, clock in clocks.items()}
    odd = [f"{host}'s by {seconds:+.0f} s" for host, seconds in off.items() if abs(seconds) > CLOCK_SECONDS]
    if odd:
        yield f"clocks are off: {listed(odd)}"


def find_wrong_products(places: Sequence[Place], products: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ranks whose product of matrices, by its digest, differs from that of most GPUs of the same kind.

    Args:
        places: the place of each rank, which says of which kind its GPU is.
        products: the digest of each rank's product; 0 on CPUs.

    Yields:
        (odd, others) for each kind of GPU whose products differ. others are the ranks with the product that more than
        half of the kind have, and odd are the rest. Without such a product, odd are all ranks of the kind, and others
        is empty.
    """
    by_kind: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, (place, product) in enumerate(zip(places, products, strict=True)):
        by_kind[place.hardware][rank] = product
    for by_rank in by_kind.values():
        odd, others = split_by_majority(by_rank)
        if odd:
            yield odd, others


def split_by_majority(values: Mapping[int, Any]) -> tuple[list[int], list[int]]:
    """Divide ranks by whether they have the value that more than half of the ranks have.

    Args:
        values: a value for each rank; at least one.

    Returns:
        The ranks with another value, and the ranks with the common value. If all values are equal, the first list is
        empty. If no value is that common, the first list has all ranks and the second is empty.
    """
    value, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        return [*values], []
    return [rank for rank in values if values[rank] != value], [rank for rank in values if values[rank] == value]


def name_ranks(ranks: Sequence[int], places: Sequence[Place]) -> str:
    """Return the numbers of these ranks with their hosts and devices, for messages. Few of many are named."""
    return listed([name_rank(rank, places[rank]) for rank in ranks])


def _wrong_gpus(places: Sequence[Place]) -> Iterator[str]:
    """Yield a sentence on each kind of GPU whose ranks have different products of the same matrices.

    If most agree, the sentence names the other ranks as wrong. Without a majority it names all ranks of the kind.
    """
    for odd, others in find_wrong_products(places, [place.product for place in places]):
        if others:
            yield (
                f"a product of matrices has other bits on {name_ranks(odd, places)} than on most GPUs of its kind: "
                "leave it out"
            )
        else:
            yield (
                f"a product of matrices differs between {name_ranks(odd, places)}, which are of one kind, and without "
                "a majority it cannot be told which of them is wrong: try each beside another one of its kind"
            )


def _slow_gpus(places: Sequence[Place]) -> Iterator[str]:
    slow = [f"{name_rank(rank, place)} by {place.slow_by}" for rank, place in enumerate(places) if place.slow_by]
    if slow:
        yield f"GPUs slow themselves down, and all wait for them: {listed(slow)}: look at their cooling and power"


def _full_disks(places: Sequence[Place]) -> Iterator[str]:
    full = [f"{place.host}: {place.lacks}" for place in places if place.lacks]
    if full:
        yield listed(full, most=1)
