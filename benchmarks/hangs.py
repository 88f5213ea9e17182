"""Makes ranks hang, and counts how often the right ones are named: `python -m benchmarks.hangs --tries 20`.

They take turns being stopped in a step, stopped from outside at any moment, or sleeping in a step or in their data.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
from collections import Counter

from benchmarks.gpu_rows.fault_settings import Settings
from benchmarks.gpu_rows.training import FAULTY, train
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import Failure, RankError

WAYS = ("stop", "sleep", "sleep in the data", "stopped from outside")
TWO_RANKS = World(2, 2, "gloo", "cpu")
VICTIMS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))
TIMEOUT_SECONDS = 6.0  # longer than ranks take to start on an idle machine


class TooSlow(Exception):
    """The time-out came before the ranks had been made to hang."""


def hang(way: str, ranks: tuple[int, ...], chance: random.Random, world: World, timeout_seconds: float) -> Failure:
    """The failure reported for the hang of these ranks; raises TooSlow if the machine was too slow."""
    at, seen = chance.randint(2, 12), 0

    def stop(event: Event) -> None:
        nonlocal seen
        seen += isinstance(event, StepLogged)
        if from_outside and isinstance(event, StepLogged) and seen == at:
            processes = sorted(multiprocessing.active_children(), key=lambda process: int(process.name.split("-")[-1]))
            for rank in ranks:
                os.kill(processes[rank].pid or 0, signal.SIGSTOP)

    from_outside = way == "stopped from outside"
    fault = "none" if from_outside else way
    settings = Settings(epochs=10**6, fault=fault, ranks=",".join(map(str, ranks)), step=at)
    try:
        train(FAULTY, settings, world, on_event=stop, timeout_seconds=timeout_seconds)
    except RankError as failed:
        if failed.failure.kind != "hang":
            raise
        if seen < at - 1:
            raise TooSlow from None
        return failed.failure
    raise AssertionError("nothing hung")


def hang_in_time(way: str, ranks: tuple[int, ...], chance: random.Random, world: World = TWO_RANKS) -> Failure:
    """Like hang, with as much time as needed."""
    seconds = TIMEOUT_SECONDS
    while True:
        try:
            return hang(way, ranks, chance, world, seconds)
        except TooSlow:
            seconds *= 2


def named(failure: Failure) -> tuple[int | None, ...]:
    return failure.rank, *failure.others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="for each of rank 0, rank 1 and both")
    tries, chance, counts = parser.parse_args().tries, random.Random(0), Counter[tuple[tuple[int, ...], str]]()
    for number in range(tries):
        for ranks in VICTIMS:
            way = WAYS[number % len(WAYS)]
            found = named(hang_in_time(way, ranks, chance))
            counts[ranks, way] += found == ranks
            print(f"{way}: {ranks} hang, {found} named", file=sys.stderr, flush=True)
    print("| hanging | how | named correctly |\n|---|---|---|")
    for (ranks, way), count in sorted(counts.items()):
        tried = len(range(WAYS.index(way), tries, len(WAYS)))
        print(f"| rank {' and '.join(map(str, ranks))} | {way} | {count} of {tried} |")
    sys.exit(sum(counts.values()) != 3 * tries)


if __name__ == "__main__":
    main()
