"""The same clock for every trainer: when each optimizer step of a rank ended."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.events import Event, RunStarted
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link


@contextmanager
def clocked_steps(rank: int) -> Iterator[list[float]]:
    """Yields the times of the steps so far; writes those of rank 0 to steps.json."""
    times: list[float] = []
    hook = register_optimizer_step_post_hook(lambda *_: times.append(time.time()))
    yield times
    hook.remove()
    if rank == 0:
        Path("steps.json").write_text(json.dumps(times))


def run(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Our worker, clocked."""
    emit = link.emit
    with clocked_steps(environment.rank) as times:

        def noted(event: Event) -> None:
            if isinstance(event, RunStarted):
                times.clear()  # a step of the recipe's trial
            emit(event)

        link.emit = noted  # type: ignore[method-assign]
        return worker.run(environment, link, job)
