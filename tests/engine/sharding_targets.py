"""What tests of sharding have ranks do."""

import os
import signal
from dataclasses import replace
from typing import Any

from torch import distributed

from flyte_ddp.engine import worker
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.evaluations import evaluate
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.set_up import set_up
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group


class Counted:
    """Counts the bytes of whole tensors that one of torch's collectives exchanges, from now on."""

    def __init__(self, name: str, whole: str):
        self.bytes, self._call, self._whole = 0, getattr(distributed, name), whole
        setattr(distributed, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("output_tensor", "input_tensor"), args, strict=False)) | kwargs
        self.bytes += given[self._whole].nbytes
        return self._call(*args, **kwargs)


def count_exchanged(environment: Environment, link: Link, jobs: list[Job]) -> list[dict[str, int]]:
    """Of each job: the bytes of the weights and of the gradients in a step, and those of the weights in an evaluation
    of one batch."""
    found = []
    gathered, reduced = Counted("all_gather_single", "output_tensor"), Counted("reduce_scatter_single", "input")
    with process_group(environment, 60) as device:
        for job in jobs:
            parts = set_up(environment, device, job, BlockCache(environment))
            for counted in (gathered, reduced):
                counted.bytes = 0
            parts.state.train_step(next(parts.train.steps(0)), False)
            counts = {"gathered": gathered.bytes, "reduced": reduced.bytes}
            evaluate(parts.state, parts.test, link)
            found.append({**counts, "evaluating": gathered.bytes - counts["gathered"]})
    return found


def train_on_two_nodes(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Trains as two nodes do, with half of the ranks on each; only the first sees the checkpoint."""
    return worker.run(*_on_two_nodes(environment, link, job))


def kill_on_two_nodes(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """As train_on_two_nodes, but rank 3 is killed in the middle of the second epoch, when there is a checkpoint."""
    given = _on_two_nodes(environment, link, job)
    if environment.rank == 3:
        train_step = TrainingState.train_step

        def killed(state: TrainingState, *args: Any, **kwargs: Any) -> None:
            if (state.progress.epoch, state.progress.step) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(state, *args, **kwargs)

        TrainingState.train_step = killed  # type: ignore
    return worker.run(*given)


def train_on_a_checkpoint_of_its_own(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Trains as many nodes do in a retry: only rank 0 knows that the checkpoint is not the one that the user names."""
    named = replace(job, options=replace(job.options, resume_from="a folder"))
    return worker.run(environment, link, named if environment.rank else job)


def train_on_uneven_nodes(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Trains with two ranks on the first node and one on the second."""
    size = 2 if environment.rank < 2 else 1
    world = replace(environment.world, local_size=size)
    return worker.run(replace(environment, world=world, local_rank=environment.rank % 2), link, job)


def _on_two_nodes(environment: Environment, link: Link, job: Job) -> tuple[Environment, Link, Job]:
    half = environment.world.size // 2
    world, local_rank = replace(environment.world, local_size=half), environment.rank % half
    seen = job if environment.rank < half else replace(job, checkpoint_path="")
    return replace(environment, world=world, local_rank=local_rank), link, seen
