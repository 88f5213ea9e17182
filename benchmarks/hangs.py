"""Makes ranks hang, and counts how often the right ones are named: `python -m benchmarks.hangs --tries 20`.

They take turns being stopped in a step, stopped from outside at any moment, or sleeping in a step or in their data.
--nodes 2: under torchrun, one of the ranks of a node, or a whole node with its agent is stopped from outside.
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
from benchmarks.hanging_nodes import RANKS, WAYS, WHOLE_NODE, hang_on_nodes
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import Failure, RankError

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


def count_on_nodes(numbers: range, nodes: int) -> int:
    """Prints a row for each try, and returns how many failed."""
    failed = 0
    print("| hanging | how | named by the ranks that can tell | seconds from the last step |\n|---|---|---|---|")
    for number in numbers:
        way = [*WAYS, WHOLE_NODE][number % (len(WAYS) + 1)]
        first = number // (len(WAYS) + 1) % nodes * RANKS
        ranks = tuple(range(first, first + RANKS)) if way == WHOLE_NODE else (first + number % RANKS,)
        failures, seconds = hang_on_nodes(way, ranks, random.Random(number), nodes)
        # With the node that keeps the ranks' store nobody can be asked any more
        expected = ranks[:1] if way == WHOLE_NODE and first == 0 else ranks
        is_right = all(named(failure) == expected and "wait in gloo:" in failure.message for failure in failures)
        failed += not is_right
        said = f"{len(failures)} of {len(failures)}" if is_right else f"NOT: {[*map(named, failures)]}"
        print(f"| rank {' and '.join(map(str, ranks))} | {way} | {said} | {seconds:.1f} |", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="for each of rank 0, rank 1 and both; in all with nodes")
    parser.add_argument("--nodes", type=int, default=1, help="if more than one, ranks of torchrun on that many")
    parser.add_argument("--first", type=int, default=0, help="of the tries with nodes, to go on after others")
    asked = parser.parse_args()
    if asked.nodes > 1:
        sys.exit(count_on_nodes(range(asked.first, asked.first + asked.tries), asked.nodes))
    tries, chance, counts = asked.tries, random.Random(0), Counter[tuple[tuple[int, ...], str]]()
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
