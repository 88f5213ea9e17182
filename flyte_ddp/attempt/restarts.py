"""Restarts of a pod's ranks, from their checkpoint.

They are faster than another pod, which needs room, has to start, and must download its data.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.events import CheckpointWritten, Event, RanksRestarted
from flyte_ddp.launch.failures import LOSSES, RankError
from flyte_ddp.launch.limits import memory_kills

MOST = 2  # restarts per attempt
# Runs the ranks for (job, on_event), and returns their results by rank
Start = Callable[[Job, Callable[[Event], None]], list[TrainingResult]]


def restarting(platform: Platform, start: Start) -> Start:
    """Return a function like `start` that starts the ranks again, at most twice, after some failures.

    The ranks are started again only if all of this is true:
    - A rank was killed, has lost its peers, or hangs.
    - The failed call has written a checkpoint, which the next call continues from.
    - During the call, the kernel has killed no process for want of memory.

    Before each further call, the function emits the event RanksRestarted. Any other error is raised. In a local run,
    `start` itself is returned.

    Args:
        platform: the platform.
        start: start(job, on_event) runs the ranks, and returns their results by rank.
    """

    def start_again(job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
        newest: CheckpointWritten | None = None

        def note(event: Event) -> None:
            nonlocal newest
            if isinstance(event, CheckpointWritten):
                newest = event
            on_event(event)

        for left in reversed(range(MOST)):
            before = newest
            kills = memory_kills()
            try:
                return start(replace(job, launched=time.time()), note)
            except RankError as error:
                if newest is before or error.failure.kind not in ("hang", *LOSSES) or memory_kills() > kills:
                    raise
                on_event(RanksRestarted(str(error), left))
        return start(replace(job, launched=time.time()), on_event)

    return start if platform.is_local() else start_again
