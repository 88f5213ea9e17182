"""Trains as one of the ranks that torchrun or a cluster's scheduler has started, or as the only rank."""

import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Optional

import torch

from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.errors import InputError, ReportedError, StopRequested
from flyte_ddp.events import Event
from flyte_ddp.launch.environment import Environment, choose_world, environment_from_variables, threads_per_rank
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.settings import RunOptions, TrainingSettings


@contextmanager
def own_environment(settings: TrainingSettings) -> Iterator[Environment]:
    """This process's place in the world that its launcher describes, or in a world of its own."""
    if "WORLD_SIZE" in os.environ:
        environment = environment_from_variables(settings.backend)
        size = environment.world.size
        if settings.batch_size < size:
            raise InputError(
                f"batch_size must be at least the number of ranks ({size}), got {settings.batch_size}: raise it"
            )
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="ddp-") as private:
        world = choose_world(settings.backend, 1, settings.batch_size)
        yield Environment(world, 0, 0, f"file://{private}/rendezvous", threads_per_rank(1))


def train(
    environment: Environment, device: torch.device, job: Job, on_event: Optional[Callable[[Event], None]]
) -> TrainingResult:
    """Trains as this rank of a process group; passes events to on_event, if given.

    A request to stop ends it with ReportedError, after a checkpoint.
    """
    link = DirectLink(on_event)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, link.on_signal)
    try:
        result = worker.train(environment, device, link, job)
    except StopRequested as stopped:
        raise ReportedError(f"{stopped}; the same command resumes from {job.checkpoint_path}") from None
    if environment.rank == 0:
        Path(job.checkpoint_path).unlink(missing_ok=True)
    return result


def join_and_train(job: Job, options: RunOptions, on_event: Callable[[Event], None]) -> TrainingResult:
    """Joins the other ranks and trains as one of them; rank 0 passes events to on_event."""
    with (
        own_environment(job.identity.settings) as environment,
        process_group(environment, options.timeout_seconds) as device,
    ):
        if environment.rank == 0 and not options.resume:
            Path(job.checkpoint_path).unlink(missing_ok=True)
        return train(environment, device, job, on_event if environment.rank == 0 else None)
