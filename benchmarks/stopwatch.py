"""What ranks run to be measured: the engine's own worker, with a stopwatch around its training epoch."""

import copy
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from flyte_ddp.engine import loop, worker
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.loop import train_until
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link

BLOCK = 20  # steps between two changes of side: a third of a second, so that both meet the same load of the machine


class Cost(NamedTuple):
    """What one rank needed for its last epoch: seconds, CPU seconds, private memory."""

    seconds: float
    processor_seconds: float
    own_bytes: int


class Rates(NamedTuple):
    """Samples per second, all ranks together, of a training epoch and of the bare step on one fixed batch."""

    epoch: float
    fixed_batch: float


def count_cost(environment: Environment, link: Link, job: Job) -> Cost:
    """Trains as the engine does; evaluation is not counted. Linux only."""
    costs = []

    def counted(*arguments: Any) -> None:
        started, processor_started = time.perf_counter(), time.process_time()
        train_until(*arguments)
        seconds, processor_seconds = time.perf_counter() - started, time.process_time() - processor_started
        costs.append(Cost(seconds, processor_seconds, own_bytes()))

    with patch.object(loop, "train_until", counted):
        worker.run(environment, link, job)
    return costs[-1]


def own_bytes() -> int:
    """Memory that only this process has written to, without what all ranks share (torch's code, the images)."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_Dirty:"))


def compare_with_fixed_batch(environment: Environment, link: Link, job: Job) -> Rates:
    """Trains as the engine does, but pauses each epoch every few steps for as many steps on one fixed batch.

    Both sides call TrainingState.train_step: forward, backward, all-reduce, optimizer, schedule. What the epoch does
    besides is the engine: making batches, metrics, log lines, heartbeats, gradient statistics, checkpoints.
    """
    rates = []

    def alternating(state: TrainingState, train: TrainBatches, *arguments: Any) -> None:
        shares = next(train.steps(state.progress.epoch))
        FixedBatch(state, shares).block()  # warm-up: the first steps of a process are slow
        fixed, steps = FixedBatch(state, shares), train.steps
        with patch.object(train, "steps", lambda *position: fixed.between(steps(*position))):
            started = clock(state.device)
            train_until(state, train, *arguments)
            seconds = clock(state.device) - started - fixed.away_seconds
        rates.append(Rates(train.samples / seconds, fixed.samples / fixed.seconds))

    with patch.object(loop, "train_until", alternating):
        worker.run(environment, link, job)
    return rates[-1]


class FixedBatch:
    """Blocks of steps on one batch in memory, after each of which the training state is restored.

    Attributes:
        samples, seconds: of the steps.
        away_seconds: the same plus the time to save and restore the state.
    """

    def __init__(self, state: TrainingState, shares: list[Batch]):
        self.state, self.shares = state, shares
        self.samples, self.seconds, self.away_seconds = 0, 0.0, 0.0

    def between(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        for number, shares in enumerate(steps):
            if number % BLOCK == 0:
                self.block()
            yield shares

    def block(self) -> None:
        left = clock(self.state.device)
        saved = copy.deepcopy(self.state.state_dict())  # which are the live tensors
        started = clock(self.state.device)
        for _ in range(BLOCK):
            self.state.train_step(self.shares, False)
        self.seconds += clock(self.state.device) - started
        self.samples += BLOCK * self.shares[0].share.size
        self.state.load_state_dict(saved)
        self.away_seconds += clock(self.state.device) - left


def clock(device: torch.device) -> float:
    """The clock in seconds, once the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
