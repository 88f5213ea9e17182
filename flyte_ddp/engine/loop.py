"""The training loop: the file to read first. The same code for one CPU process, one GPU or N GPUs on M nodes.

docs/architecture.md lists all collectives: which ranks exchange what, when, in which thread and group.
"""

import heapq
import math
import time
from operator import itemgetter
from typing import Any, Protocol

import torch

from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.evaluations import Evaluated, Evaluations
from flyte_ddp.engine.garbage import collected_between
from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.engine.monitor.stragglers import Stragglers
from flyte_ddp.engine.non_finite import find_non_finite
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.sums import Sums
from flyte_ddp.errors import NonFiniteError, StopRequested
from flyte_ddp.events import EpochFinished, GradientsSeen, StepLogged
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import WRITING

MOST_NORMS = 10


class Resumable(Protocol):
    """What a checkpoint is of: state_dict has all that a resume at this epoch and step, both from 0, needs."""

    device: torch.device
    epoch: int
    step: int

    def state_dict(self) -> dict[str, Any]: ...


class Checkpoints(Protocol):
    def due(self) -> bool: ...

    def save(self, state: Resumable, is_last: bool = False) -> None: ...

    def close(self) -> None: ...


def fit(
    state: TrainingState,
    train: TrainBatches,
    split: EvaluationBatches,
    epochs: int,
    evaluations_per_epoch: int,
    log_interval: int,
    link: Link,
    checkpoints: Checkpoints,
    stragglers: Stragglers,
) -> Evaluated | None:
    """Trains from the state's position to the end of the last epoch; the measures end up in state.history.

    split: what to evaluate on: the validation split if there is one, else the test split.
    Returns the last evaluation; None if the training was resumed after its last epoch.
    """
    evaluations = Evaluations(state, split, len(train), link)

    def is_over() -> bool:
        return state.epoch >= epochs or evaluations.are_over

    while not is_over():
        done = state.evaluations_of_epoch
        begin, end = (len(train) * number // evaluations_per_epoch for number in (done, done + 1))
        sums = train_epoch(state, train, end, log_interval, link, checkpoints, stragglers)
        state.compare_between_ranks(end - 1)
        trained = EpochFinished(
            epoch=state.epoch,
            samples=train.samples_until(end) - train.samples_until(begin),
            train=state.measures(sums.pairs),
            test={},
            train_seconds=state.epoch_seconds,
            evaluate_seconds=0.0,
            fraction=end / len(train),
            digest=state.digest(),
        )
        evaluations.after(trained)
        link.heartbeat(WRITING)
        checkpoints.save(state, is_over())
    return evaluations.last


def train_epoch(
    state: TrainingState,
    train: TrainBatches,
    end: int,
    log_interval: int,
    link: Link,
    checkpoints: Checkpoints,
    stragglers: Stragglers,
) -> Sums:
    """Steps through the epoch up to the step end, where it is evaluated; returns the sums since the last evaluation.

    Raises StopRequested, after a checkpoint, if any rank was asked to stop, and NonFiniteError, with the weights as
    before the bad step; both on all ranks at the same step.
    """
    state.parallel.train()
    sums = state.sums()
    state.logged = state.logged or sums
    seconds_before, started = state.epoch_seconds, time.perf_counter()
    for shares in collected_between(state.clock.timed(train.steps(state.epoch, state.step, end))):
        state.train_step(shares, link.stop_requested, checkpoints.due())
        link.heartbeat()
        is_last = state.step == end
        is_logged = state.step % log_interval == 0 or is_last
        recent = state.recent_sums()
        if not is_logged and not (recent and recent.asks(sums)):
            continue
        state.epoch_seconds = seconds_before + time.perf_counter() - started
        before, sums = sums, state.sums()  # which may be of steps after that, and makes the host wait, as saving does
        if sums.steps < state.step:
            again = next(train.steps(state.epoch, sums.steps))
            raise NonFiniteError.in_step(*find_non_finite(state, again), state.epoch, sums.steps)
        if is_logged:
            _log(state, train, state.logged, sums, link, stragglers)
            state.logged = sums
            if is_last:
                link.emit(stragglers.so_far())
            if state.step == len(train) and link.is_heard and state.log_gradients:
                link.emit(GradientsSeen(state.epoch, state.gradient_histograms()))
        if sums.stop or (sums.saves > before.saves and not is_last):
            state.compare_between_ranks(state.step - 1)
            link.heartbeat(WRITING)
            checkpoints.save(state, sums.stop)
        if sums.stop:
            raise StopRequested(state.epoch, state.step)
    return sums


def _log(
    state: TrainingState,
    train: TrainBatches,
    before: Sums,
    now: Sums,
    link: Link,
    stragglers: Stragglers,
) -> None:
    """Tells of the steps since the last log; a collective."""
    samples = train.samples_until(now.steps) - train.samples_until(before.steps)
    norms = state.gradient_norms()
    logged = StepLogged(
        epoch=state.epoch,
        step=state.step,
        samples=train.samples_until(now.steps),
        measures=state.measures(now.since(before)),
        learning_rate=state.learning_rate,
        samples_per_second=samples / (now.seconds - before.seconds),
        gradient_norms=norms if state.log_gradients else dict(heapq.nlargest(MOST_NORMS, norms.items(), itemgetter(1))),
        gradient_norm=math.hypot(*norms.values()),
    )
    link.emit(logged)
    for warning in state.loss_monitor.after_steps(state.epoch, state.step, logged.measures["loss"], samples):
        link.emit(warning)
    steps, times = state.clock.steps, state.clock.read_all()
    state.keep_pace(float(times[:, : StepPart.OTHER].sum(1).max()) / steps)
    slow = stragglers.after_steps(state.epoch, state.step, steps, times)
    state.loss_monitor.warnings += slow
    for event in (stragglers.so_far(), *slow) if slow else ():
        link.emit(event)
