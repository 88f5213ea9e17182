"""The report of a hang: which ranks the others wait for. Standard library only."""

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
    """The answer of a rank that says where it is. The default stands for a rank that does not answer.

    Attributes:
        reached: how many collectives it has reached.
        is_idle: whether its GPU has no work left; true on a CPU.
        collective: the last collective that it has reached, or that its GPU is in, with types and shapes; empty if
            unknown.
        stack: the stacks of its threads, or of the one that trains.
        phase: the phase of its last sign of life.
    """

    reached: int = -1
    is_idle: bool = False
    collective: str = ""
    stack: str = NO_ANSWER
    phase: str = ""


def report_hang(answers: Mapping[int, Answer], hosts: Mapping[int, str], timeouts: Timeouts) -> Failure:
    """Return the failure that names the ranks that the others wait for, with what each rank answers.

    All ranks reach the same collectives in the same order. They wait there for the ranks that have reached fewer, or
    whose GPU is still busy with earlier work.
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
    """Format the ranks' answers: their host, last collective and stacks.

    Ranks of a host with the same collective and stacks share one entry.

    Args:
        answers: the answers by rank.
        hosts: the hosts by rank.
    """
    alike: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, answer in answers.items():
        alike[hosts[rank], answer.collective, answer.stack].append(rank)
    return "\n".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:\non {host}"
        f"{f', last collective {collective}' if collective else ''}\n{stack}"
        for (host, collective, stack), ranks in alike.items()
    )
