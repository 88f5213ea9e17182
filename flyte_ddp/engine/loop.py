"""The training loop of a recipe: the file to read first. The same code for one CPU process, or N GPUs on M nodes.

docs/architecture.md lists all collectives: which ranks exchange what, when, in which thread and group.
"""

import time
from typing import Any

from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.evaluations import Evaluated, evaluate
from flyte_ddp.engine.garbage import collected_between
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import EpochFinished, GradientsSeen
from flyte_ddp.launch.link import Link
from flyte_ddp.settings import TrainingSettings


def fit(
    state: TrainingState, train: TrainBatches, split: EvaluationBatches, settings: TrainingSettings, link: Link
) -> Evaluated | None:
    """Train from the state's position to the end of the last epoch, and evaluate in between.

    Args:
        state: its progress has the evaluations in the end.
        train: the batches of an epoch.
        split: what to evaluate on: the validation split if there is one, else the test split.
        settings: say how many epochs, evaluations of each, and log lines there are.
        link: to the parent, which may ask for a stop.

    Returns:
        The last evaluation; None if the training was resumed after its last epoch.

    Raises:
        StopRequested: A rank was asked to stop; there is a checkpoint.
        NonFiniteError: A loss or gradient is not finite; the weights are those before it.
    """
    progress = state.progress
    evaluated: Evaluated | None = None
    while not _is_over(state, settings):
        done = sum(finished.epoch == progress.epoch for finished in progress.history)
        begin, end = (len(train) * number // settings.evaluations_per_epoch for number in (done, done + 1))
        train_epoch(state, train, end, settings.log_interval, link)
        state.compare_between_ranks()
        digest, started = state.digest(), time.perf_counter()
        try:
            evaluated = evaluate(state, split, link)
        except StopRequested:
            progress.save(state, is_last=True)
            raise
        name = "validation" if state.best_tracker else "test"
        measures: dict[str, Any] = {"test": {}, name: evaluated.measures}
        finished = EpochFinished(
            epoch=progress.epoch,
            samples=train.samples_until(end) - train.samples_until(begin),
            train=state.measures(progress.last.pairs),
            train_seconds=progress.seconds,
            evaluate_seconds=time.perf_counter() - started,
            fraction=end / len(train),
            digest=digest,
            **measures,
        )
        evaluated.check_loss(name, finished.position)
        progress.evaluated(finished, evaluated.broken, evaluated.mismatched)
        state.choose(finished)
        progress.begin_next(finished.fraction)
        is_over = _is_over(state, settings)
        progress.save(state, is_over or evaluated.stop)
        if evaluated.stop and not is_over:
            raise StopRequested(progress.epoch, progress.step)
    return evaluated


def _is_over(state: TrainingState, settings: TrainingSettings) -> bool:
    has_waited = state.best_tracker is not None and state.best_tracker.is_over
    return state.progress.epoch >= settings.last_epoch or has_waited


def train_epoch(state: TrainingState, train: TrainBatches, end: int, log_interval: int, link: Link) -> None:
    """Step through the epoch up to the step end, where it is evaluated.

    Raises:
        StopRequested: After a checkpoint, if any rank was asked to stop; on all ranks at the same step.
        NonFiniteError: On all ranks alike, with the weights as before the bad step.
    """
    progress = state.progress
    assert progress.checkpoints
    state.parallel.train()
    progress.go_on()
    for shares in collected_between(progress.clock.timed(train.steps(progress.epoch, progress.step, end))):
        state.train_step(shares, link.stop_requested, progress.checkpoints.due())
        is_last = progress.step == end
        asked = progress.end_step(state, is_last or progress.step % log_interval == 0)
        if progress.step == len(train) and link.is_heard and state.log_gradients:
            link.emit(GradientsSeen(progress.epoch, state.gradient_histograms()))
        progress.obey(state, asked, is_evaluated=is_last)
