"""The training loop: the file to read first. The same code for one CPU process, one GPU or N GPUs on M nodes.

docs/architecture.md lists all collectives: which ranks exchange what, when, in which thread and group.
"""

import heapq
import math
import time
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.garbage import collected_between
from flyte_ddp.engine.measures import check_rows, mismatched, pairs_of, sums_of
from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.engine.monitor.stragglers import Stragglers
from flyte_ddp.engine.non_finite import find_non_finite
from flyte_ddp.engine.sharding.sharding import in_own_types
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.sums import Sums
from flyte_ddp.errors import NonFiniteError, StopRequested, UnevenShapesError
from flyte_ddp.events import EpochChosen, EpochFinished, GradientsSeen, StepLogged
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


class Evaluated(NamedTuple):
    """The evaluation of a whole test or validation split.

    Attributes:
        measures: by name.
        mismatched: mean loss of outputs paired with other samples; 0 if it was not computed.
        predictions: (n, ...) of this rank's samples only, on the host; None if the recipe returns none.
        broken: names of the measures of which a sample's value is not finite.
    """

    measures: dict[str, float]
    mismatched: float
    predictions: Tensor | None
    broken: list[str]


def fit(
    state: TrainingState,
    train: TrainBatches,
    split: EvaluationBatches,
    epochs: int,
    evaluations: int,
    log_interval: int,
    link: Link,
    checkpoints: Checkpoints,
    stragglers: Stragglers,
) -> Evaluated | None:
    """Trains from the state's position to the end of the last epoch; the measures end up in state.history.

    split: what to evaluate on: the validation split if there is one, else the test split. evaluations: per epoch.
    Returns the last evaluation; None if the training had already been finished.
    """
    evaluated = None

    def is_over() -> bool:
        return state.epoch >= epochs or bool(state.best_tracker and state.best_tracker.is_over)

    while not is_over():
        done = state.evaluations_of_epoch
        begin, end = (len(train) * number // evaluations for number in (done, done + 1))
        sums = train_epoch(state, train, end, log_interval, link, checkpoints, stragglers)
        state.compare_between_ranks(end - 1)
        started = time.perf_counter()
        evaluated = evaluate(
            state, split, link, "validation" if state.best_tracker else "test", state.epoch + end / len(train)
        )
        finished = EpochFinished(
            epoch=state.epoch,
            samples=train.samples_until(end) - train.samples_until(begin),
            train=state.measures(sums.pairs),
            test={} if state.best_tracker else evaluated.measures,
            train_seconds=state.epoch_seconds,
            evaluate_seconds=time.perf_counter() - started,
            validation=evaluated.measures if state.best_tracker else {},
            fraction=end / len(train),
            digest=state.digest(),
        )
        state.after_evaluation(finished)
        link.emit(finished)
        warnings = state.loss_monitor.not_finite(evaluated.broken, finished.split, finished.position, end)
        for warning in warnings + state.loss_monitor.after_evaluation(finished, end, evaluated.mismatched):
            link.emit(warning)
        link.heartbeat(WRITING)
        checkpoints.save(state, is_over())
    return evaluated


def look_at_test(state: TrainingState, test: EvaluationBatches, epochs: int, link: Link) -> Evaluated:
    """Evaluates the weights that training returns (with a validation split, the best epoch's) on the test split."""
    tracker, started = state.best_tracker, time.perf_counter()
    if tracker and tracker.weights is not None:
        state.load_weights(state.evaluated, tracker.weights)
    chosen = state.history[tracker.chosen(len(state.history) - 1) if tracker else -1]
    evaluated = evaluate(state, test, link, "test", chosen.position)
    warnings = state.loss_monitor.not_finite(evaluated.broken, "test", chosen.position, 0)
    if tracker and tracker.best < 0:
        warnings += state.loss_monitor.never_chosen(tracker.measure, chosen.position)
    for warning in warnings:
        link.emit(warning)
    if tracker:
        event = EpochChosen(
            epoch=chosen.epoch,
            epochs=state.history[-1].position if state.step else state.epoch,
            measures=evaluated.measures,
            stopped_early=state.epoch < epochs,
            is_best=tracker.best >= 0,
            seconds=time.perf_counter() - started,
            fraction=chosen.fraction,
        )
        link.emit(event)
    return evaluated


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

    Raises StopRequested, after a checkpoint, if any rank was asked to stop, and NonFiniteError or UnevenShapesError,
    with the weights as before the bad step; all of them on all ranks at the same step.
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
            if sums.uneven:
                raise UnevenShapesError(state.epoch, sums.steps, state.mode.drawn)
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


@torch.no_grad()
def evaluate(state: TrainingState, test: EvaluationBatches, link: Link, split: str, position: float) -> Evaluated:
    """The measures over the whole split, computed in float32: each rank evaluates its share, and sums are added up.

    Raises NonFiniteError, on all ranks, if the loss is not finite. position: in epochs.
    """
    recipe, model = state.recipe, state.evaluated
    model.eval()
    mismatches = not (state.loss_monitor.constant_loss or recipe.uses_global_batch)
    rows: list[Tensor] = []
    # With virtual ranks each part has its own, to be added up in their order, whichever rank has computed it
    by_part = torch.zeros(test.virtual_ranks or 1, 2 * len(state.names) + 2, dtype=torch.float64, device=state.device)
    with in_own_types(model):
        for batch in test:
            vars(recipe.share).update(vars(batch.share))
            with state.mode.block(batch.seed):
                outputs = recipe.forward(model, batch.tree)
                sums = by_part[batch.share.part]
                sums[:-2] += sums_of(pairs_of(recipe, outputs, batch, state.names))
                if mismatches and batch.share.count > 1:
                    others = pairs_of(recipe, mismatched(outputs), batch, state.names)
                    sums[-2:] += sums_of({"loss": others["loss"]})
                predictions = recipe.predictions(outputs, batch.tree)
            if predictions is not None:
                check_rows(recipe, predictions, rows[0] if rows else predictions)
                rows.append(batch.share.own(predictions).cpu())  # those of a whole split may not fit on a GPU
            link.heartbeat()
    distributed.all_reduce(by_part)
    *pairs, loss, weight = by_part.sum(0).tolist()
    totals = dict(zip(state.names, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
    broken = [name for name, total in totals.items() if not math.isfinite(sum(total))]
    if "loss" in broken:
        raise NonFiniteError.in_evaluation(totals["loss"][0] / (totals["loss"][1] or 1.0), split, position)
    predictions = torch.cat(rows) if rows else None
    return Evaluated(state.measures(pairs), loss / weight if weight else 0.0, predictions, broken)


def gather(rows: Tensor, test: EvaluationBatches, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """For each global batch of the test split: its samples (n,), and their rows (n, ...) on the host, from the rows of
    each rank's share; a collective for each, by way of the device."""
    for samples, (start, stop) in test.whole():
        gathered = rows.new_zeros(len(samples), *rows.shape[1:], device=device)
        gathered[start:stop], rows = rows[: stop - start], rows[stop - start :]
        distributed.all_reduce(gathered.view(-1).view(torch.uint8))  # the others' are zeros; not all types can be added
        yield samples, gathered.cpu()
