"""The report of a hang: which ranks the others wait for. Standard library only.

Each rank gives an Answer, and report_hang compares them. Two places watch for silent ranks and ask, because neither
keeps the other's promises. Under our launcher the parent does (launcher.py), over pipes: it imports no torch, so it has
no client for the ranks' store, but it names ranks that cannot ask one another, as all are stopped, keep the
interpreter's lock, or have not met yet, and it gets their stacks. Under torchrun (watchdog.py) ranks of several hosts
have no such parent, so they ask one another over their store.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from flyte_ddp.launch.failures import Failure
from flyte_ddp.launch.phases import STEPPING, Timeouts
from flyte_ddp.text import shortened

ANSWER_SECONDS = 5.0  # how long the ranks of a hang may take to say where they are; stopped ones never do
NO_ANSWER = "does not answer (stopped, or stuck in the kernel)\n"
MOST_CHARACTERS = 50_000  # the limit for all stacks; those of the ranks that the others wait for come first
KEEPS_STORE = "does not answer, nor does the store of all ranks, which it keeps: others may hang, too\n"


@dataclass(frozen=True)
class Answer:
    """The answer of a rank to the question where it is. The default stands for a rank that does not answer.

    Attributes:
        reached: how many collectives the rank has reached; -1 without an answer.
        is_idle: whether its GPU has no work left; true on a CPU.
        collective: the last collective that the rank has reached, or that its GPU is in, with types and shapes; empty
            if unknown.
        stack: the stacks of its threads, or of the one that trains. The launcher reads them without an answer, too.
        phase: the phase of its last sign of life, one of phases.py; empty if unknown.
    """

    reached: int = -1
    is_idle: bool = False
    collective: str = ""
    stack: str = ""
    phase: str = ""


def report_hang(answers: Mapping[int, Answer], hosts: Mapping[int, str], timeouts: Timeouts) -> Failure:
    """Return a Failure of kind "hang" that names the ranks for which the others wait, with the stacks of all ranks.

    All ranks call the same collectives in the same order. So the culprits are the ranks that do not answer. If all
    answer, the culprits are the ranks that have reached the fewest collectives or, if some of these have a busy GPU,
    only those with a busy GPU. So all are culprits if all are equally far, and all or none have a busy GPU. The failure
    is recoverable. Its `rank` is the lowest of the culprits, and its `others` are the rest.

    Args:
        answers: the answer of each rank, at least one. One whose `reached` is below 0 stands for a rank that has not
            answered.
        hosts: the host of each of these ranks.
        timeouts: the limits, one of which was exceeded. The message names that limit.
    """
    progress = {rank: (answer.reached, answer.is_idle) for rank, answer in answers.items()}
    by_progress = sorted(progress, key=lambda rank: (progress[rank], rank))
    least = min(progress.values())
    first, *others = (rank for rank in by_progress if progress[rank] == least)
    waiting = {answers[rank].collective for rank in progress if progress[rank] > least} - {""}
    phases = (answers[rank].phase for rank in by_progress)  # a rank that does not answer is in the others' phase
    message = timeouts.exceeded(next(filter(None, phases), STEPPING))
    if waiting:
        message += f"; the others wait in {' and '.join(sorted(waiting))}"
    return Failure(
        rank=first,
        host=", ".join(dict.fromkeys(hosts[rank] for rank in (first, *others))),
        kind="hang",
        cause="Hang",
        message=f"{message}; the stacks of all ranks follow",
        details=shortened(_details({rank: answers[rank] for rank in by_progress}, hosts), MOST_CHARACTERS),
        others=tuple(others),
    )


def _details(answers: Mapping[int, Answer], hosts: Mapping[int, str]) -> str:
    """Format the host, last collective and stacks of each rank, in the order of the answers.

    Ranks of one host with the same collective and the same stacks share one entry. For a rank without an answer and
    without stacks, a line says that the rank does not answer.

    Args:
        answers: the answer of each rank. A rank has not answered if `reached` is below 0.
        hosts: the host of each rank.
    """
    alike: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, answer in answers.items():
        stack = answer.stack or (NO_ANSWER if answer.reached < 0 else "")
        alike[hosts[rank], answer.collective, stack].append(rank)
    return "\n".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:\non {host}"
        f"{f', last collective {collective}' if collective else ''}\n{stack}"
        for (host, collective, stack), ranks in alike.items()
    )
