"""Slows one of two ranks down, and counts how often it is named, and for what: `python -m benchmarks.stragglers`.

In its data, in its forward pass, or by a busy process on its core; and as many trainings are left undisturbed, in which
no rank may be named. Each rank has a core of its own, as on a node. Needs two cores, and Linux.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.engine import hardware, train
from benchmarks.slowed_settings import SLOWED, WAYS, Settings, core_of
from flyte_ddp.events import Event, SlowRank

BUSY = "busy core"
CAUSES = {"none": "", "data": "data", "forward pass": "compute", BUSY: "compute"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=CAUSES, default=[*CAUSES])
    parser.add_argument("--milliseconds", type=float, default=10.0, help="by which a step takes longer")
    arguments = parser.parse_args()
    found: dict[str, Counter[str]] = {}
    for number, way in itertools.product(range(arguments.runs), arguments.ways):
        found.setdefault(way, Counter())[outcome(way, number % 2, arguments.milliseconds)] += 1
    print(f"{hardware()}; {arguments.milliseconds:g} ms; n = {arguments.runs}\n")
    print("| slowed by | rightly named | otherwise |\n|---|---|---|")
    for way, outcomes in found.items():
        right = outcomes.pop("right", 0)
        others = ", ".join(f"{count} x {what}" for what, count in outcomes.items())
        print(f"| {way} | {right} of {arguments.runs} | {others or '-'} |", flush=True)


def outcome(way: str, rank: int, milliseconds: float) -> str:
    """What is said in one training: right, nothing, or what else."""
    named: list[SlowRank] = []

    def listen(event: Event) -> None:
        if isinstance(event, SlowRank):
            named.append(event)
            print(f"{way}, rank {rank}: {event.reason}", file=sys.stderr, flush=True)

    settings = Settings(way=way if way in WAYS else "none", rank=rank, milliseconds=milliseconds)
    with busy_processes(int(way == BUSY), core_of(rank)):
        train(settings, None, 2, on_event=listen, worker="benchmarks.slowed:train_pinned", recipe=SLOWED)
    said = {(event.rank, event.cause) for event in named}
    if said == ({(rank, CAUSES[way])} if CAUSES[way] else set()):
        return "right"
    return " and ".join(f"rank {who} for {cause}" for who, cause in sorted(said)) or "nothing"


@contextmanager
def busy_processes(number: int, core: int) -> Iterator[None]:
    """While the block runs, so many processes compute on this core."""
    processes = [multiprocessing.Process(target=turn, daemon=True) for _ in range(number)]
    try:
        for process in processes:
            process.start()
            os.sched_setaffinity(process.pid or 0, {core})
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def turn() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
