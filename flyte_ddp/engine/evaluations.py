"""Evaluations of a training, between its steps."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.batches.batches import Batch, EvaluationBatches
from flyte_ddp.engine.collectives import all_reduce_flags
from flyte_ddp.engine.measures import check_rows, compute_pairs, mismatched, sum_measures
from flyte_ddp.engine.seeds import put_back_generators, seed_part
from flyte_ddp.engine.sharding.sharding import in_own_types
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.stop_poll import StopPoll
from flyte_ddp.engine.virtual_ranks.gathered import Gathered, compute_rows
from flyte_ddp.errors import NonFiniteError, StopRequested
from flyte_ddp.events import EpochChosen
from flyte_ddp.launch.link import Link


class Evaluated(NamedTuple):
    """The evaluation of a whole test or validation split.

    Attributes:
        measures: the measures of the whole split, by name; the same on all ranks.
        guessing_loss: mean loss of outputs paired with other samples; 0 if it was not computed.
        predictions: (n, ...), those of this rank's samples only, on the host; None if the recipe returns none.
        broken: names of the measures of which a sample's value is not finite.
        stop: whether a rank was asked to stop by the end of the evaluation; the same on all ranks.
    """

    measures: dict[str, float]
    guessing_loss: float
    predictions: Tensor | None
    broken: list[str]
    stop: bool

    def check_loss(self, split: str, position: float) -> None:
        """Raise NonFiniteError on all ranks if a sample's loss is not finite; position counts the epochs trained."""
        if "loss" in self.broken:
            raise NonFiniteError.in_evaluation(self.measures["loss"], split, position)


def evaluate_test(state: TrainingState, test: EvaluationBatches, epochs: int, link: Link) -> Evaluated:
    """Evaluate the final weights on the test split; a collective.

    With a validation split, the best evaluation's weights are loaded first, into the network or, if there is one, into
    its moving average. If the measure has never been finite, the last step's weights are evaluated, and a warning is
    emitted. In both cases EpochChosen is emitted.

    Without a validation split, the last step's weights are evaluated.

    A warning is emitted for each measure of the test split that is not finite.

    Args:
        state: the training, which is over.
        test: the batches of the test split.
        epochs: the number of epochs to train by the settings. If fewer were trained, the event says that training
            stopped early.
        link: gets the event, and is told that the process is alive.

    Returns:
        The evaluation, with this rank's predictions.

    Raises:
        NonFiniteError: The loss on the test split is not finite. All ranks raise it.
        StopRequested: A rank was asked to stop, and the evaluation was left. All ranks raise it.
        InputError: As evaluate() raises it.
    """
    tracker = state.best_tracker
    started = time.perf_counter()
    if tracker and tracker.weights is not None:
        state.load_weights(state.evaluated, tracker.weights)
    chosen = state.progress.history[tracker.best if tracker else -1]  # without a best one, best is -1
    evaluated = evaluate(state, test, link)
    evaluated.check_loss("test", chosen.position)
    step = round(chosen.fraction * len(state.train))
    warnings = state.progress.monitor.warn_of_not_finite(evaluated.broken, "test", chosen.position, step)
    if tracker and tracker.best < 0:
        reason = (
            f"the weights are those of the last epoch, not of the best: {tracker.measure} on the validation split has "
            'never been a finite number: look for samples whose value divides by 0, or set choose_by to "loss"'
        )
        warnings += state.progress.monitor.record(chosen.epoch, step, [reason])
    state.progress.emit_all(warnings)
    if tracker:
        event = EpochChosen(
            epoch=chosen.epoch,
            epochs=state.progress.history[-1].position if state.progress.step else state.progress.epoch,
            measures=evaluated.measures,
            stopped_early=state.progress.epoch < epochs,
            is_best=tracker.best >= 0,
            seconds=time.perf_counter() - started,
            fraction=chosen.fraction,
        )
        link.emit(event)
    return evaluated


@torch.no_grad()
def evaluate(state: TrainingState, split: EvaluationBatches, link: Link) -> Evaluated:
    """Measure the network on a whole split, in float32; a collective.

    Each rank evaluates its share of the batches. The measures are made from the sums of all ranks. The moving average
    of the weights is evaluated if the training has one. Random generators are seeded for each batch. Afterwards the
    network is in training mode, and its buffers are rank 0's.

    Args:
        state: the training.
        split: the batches of the split.
        link: told after each batch that the process is alive. Its stop_requested says whether this rank is asked to
            stop.

    Returns:
        The evaluation, the same on all ranks, except that `predictions` are those of this rank's samples, on the host.
        If a sample's loss is not finite, `measures` has only the loss. `stop` is True if a rank was asked to stop too
        late to leave the evaluation.

    Raises:
        StopRequested: A rank was asked to stop. All ranks raise it after the same batch, with the buffers as before.
        InputError: The outputs are None. Or measure() does not return its measures with one value for each sample, or
            predictions() a row for each sample, of the same shape in all batches. Only the rank that finds this raises
            it.
    """
    recipe, model = state.recipe, state.evaluated
    model.eval()
    before = state.evaluated_buffers.copy()
    poll = StopPoll(state.device)
    rows: list[Tensor] = []
    # With virtual ranks each part has its own, to be added up in their order, whichever rank has computed it
    by_part = torch.zeros(split.virtual_ranks or 1, 2 * len(state.names) + 2, dtype=torch.float64, device=state.device)
    with in_own_types(model):
        for batch, outputs in _forward_all(state, split, lambda: poll.after_batch(link.stop_requested)):
            sums = by_part[batch.share.part if split.virtual_ranks else 0]
            sums[:-2] += sum_measures(compute_pairs(recipe, outputs, batch, state.names))
            if split.is_mixed and batch.share.count > 1:
                others = compute_pairs(recipe, mismatched(outputs), batch, state.names)
                sums[-2:] += sum_measures({"loss": others["loss"]})
            predictions = recipe.predictions(outputs, batch.tree)
            if predictions is not None:
                check_rows(recipe, predictions, batch.share.count, rows[0] if rows else None)
                rows.append(batch.share.own(predictions).cpu())  # those of a whole split may not fit on a GPU
            link.heartbeat()
    model.train()  # a layer may change its weights in evaluation mode, as loralib's: a checkpoint has those of training
    if poll.is_agreed:
        before.put_back()
        raise StopRequested(state.progress.epoch, state.progress.step, is_evaluating=True)
    state.evaluated_buffers.broadcast()  # a forward pass may change them in evaluation mode, too
    distributed.all_reduce(by_part)
    *pairs, loss, weight = by_part.sum(0).tolist()
    totals = dict(zip(state.names, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
    broken = [name for name, total in totals.items() if not math.isfinite(sum(total))]
    predictions = torch.cat(rows) if rows else None
    value, total = totals["loss"]
    # With a loss that is not finite, a recipe need not be able to compute others
    measures = {"loss": value / (total or 1.0)} if "loss" in broken else state.measures(pairs)
    mean = loss / weight if weight else 0.0
    return Evaluated(measures, mean, predictions, broken, all_reduce_flags([link.stop_requested], state.device)[0])


def _forward_all(
    state: TrainingState, split: EvaluationBatches, is_over: Callable[[], bool]
) -> Iterator[tuple[Batch, Any]]:
    """Yield each batch that this rank evaluates, with the outputs of the recipe's forward() for it; a collective.

    A global batch gives one batch or, with virtual ranks, one for each part of this rank that has samples. A rank
    without samples in a global batch gets one batch with a sample of another rank. Such a batch has share.borrowed set,
    and the caller must not count it.

    At each yield, recipe.share is the batch's share, and the random generators are as forward() has left them for this
    batch.

    With virtual ranks, if the recipe's measure() calls all_gather(), the caller may call measure() once for each batch.
    all_gather() then returns the rows of all parts. A second measure() for the same batch raises InputError.

    Args:
        state: the training.
        split: the batches of the evaluation.
        is_over: is called after each global batch. If is_over returns True, no more batches are yielded. The result
            must be the same on all ranks.

    Raises:
        InputError: With virtual ranks, forward() calls all_gather(), or measure() calls all_gather() for some parts
            only.
    """
    recipe, model = state.recipe, state.evaluated

    def forward(batch: Batch) -> Any:
        recipe.share = batch.share
        return recipe.forward(model, batch.tree)

    def measure(outputs: Any, batch: Batch) -> Tensor:
        return compute_pairs(recipe, outputs, batch, state.names)["loss"][0]

    for shares in split.steps():
        if state.gathers_by_part:
            seen, rows = compute_rows(recipe, forward, measure, shares)
            for part, outputs, generators in seen:
                given = part if rows is None else Gathered(rows).with_known_rows(part)
                recipe.share = given.share
                put_back_generators(generators)
                yield given, outputs
        else:
            for batch in shares:
                seed_part(batch.seed, batch.share.part)
                yield batch, forward(batch)
        if is_over():
            return


def gather_rows(rows: Tensor, test: EvaluationBatches, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of all ranks, such as predictions, one global batch of the test split at a time; a collective.

    Each rank gets all rows, and must iterate to the end, because the ranks exchange rows for each batch.

    Args:
        rows: (m, ...), a row for each sample that this rank has evaluated, in the order of evaluation, on the host.
        test: the batches of the test split.
        device: the device that sends and receives the rows.

    Yields:
        For a global batch, the indices of its samples in the split, (n,) int64, and the samples' rows, (n, ...), on the
        host.
    """
    for samples, (start, stop) in test.whole():
        gathered = rows.new_zeros(len(samples), *rows.shape[1:], device=device)
        gathered[start:stop], rows = rows[: stop - start], rows[stop - start :]
        distributed.all_reduce(gathered.view(-1).view(torch.uint8))  # the others' are zeros; not all types can be added
        yield samples, gathered.cpu()
