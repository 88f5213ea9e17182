"""The training loop of a recipe: the file to read first. The same code for one CPU process, or N GPUs on M nodes.

docs/architecture.md lists all collectives: which ranks exchange what, when, in which thread and group.
"""

import time
from typing import Any

from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.evaluations import Evaluated, evaluate
from flyte_ddp.engine.garbage import collect_garbage_between
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import EpochFinished, GradientsSeen
from flyte_ddp.launch.link import Link
from flyte_ddp.settings import TrainingSettings


def fit(
    state: TrainingState, train: TrainBatches, split: EvaluationBatches, settings: TrainingSettings, link: Link
) -> Evaluated | None:
    """Train a recipe from the state's position until training is over; a collective.

    Training is over after the last epoch, or once best_tracker has seen no improvement in settings.patience
    evaluations. Each epoch has settings.evaluations_per_epoch evaluations. Each evaluation is added to the history and
    followed by a checkpoint.

    Args:
        state: the training.
        train: the batches of the training.
        split: the batches to evaluate: the validation split if there is one, else the test split.
        settings: the settings.
        link: gets events, and says whether this rank is asked to stop.

    Returns:
        The last evaluation; None if the training was over already.

    Raises:
        StopRequested: A rank was asked to stop; the checkpoint is saved.
        NonFiniteError: A loss or gradient is not finite. After a bad step, the weights are those before it.
        WrongBitsError: The weights of ranks differ, or a rank has computed wrong gradients. No checkpoint is saved.
        InputError: The recipe's code changes a frozen weight that checkpoints leave out, or computes other bits each
            time, as an audit has found.
    """
    progress = state.progress
    evaluated: Evaluated | None = None
    while not _is_over(state, settings):
        done = sum(finished.epoch == progress.epoch for finished in progress.history)
        begin, end = (len(train) * number // settings.evaluations_per_epoch for number in (done, done + 1))
        train_until(state, train, end, settings.log_interval, link)
        state.compare_between_ranks()
        digest = state.digest()
        started = time.perf_counter()
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
        progress.evaluated(finished, evaluated.broken, evaluated.guessing_loss)
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


def train_until(state: TrainingState, train: TrainBatches, end: int, log_interval: int, link: Link) -> None:
    """Take the current epoch's steps until `end` steps of the epoch are done; a collective.

    The steps go on from the state's position, in training mode. After each step whose number in the epoch is a multiple
    of log_interval, and after the last step, the steps since the last log are logged. Checkpoints that are due or were
    asked for are saved in between. After the last step of an epoch, rank 0 emits GradientsSeen if options.log_gradients
    is set.

    Args:
        state: the training, which is changed.
        train: the batches of the training.
        end: the number of steps, counted from the beginning of the epoch, after which this function returns.
        log_interval: the number of steps from one log to the next.
        link: gets events, and says whether this rank is asked to stop.

    Raises:
        StopRequested: A rank was asked to stop, and the checkpoint is saved. All ranks raise it at the same step.
        NonFiniteError: A loss or gradient is not finite. All ranks raise it, with the weights as before the bad step.
        WrongBitsError: The weights of ranks differ, as is checked before a checkpoint, or a rank has computed wrong
            gradients. No checkpoint is saved.
        InputError: The recipe's code changes a frozen weight that checkpoints leave out, or computes other bits each
            time.
    """
    progress = state.progress
    state.parallel.train()
    progress.go_on()
    while progress.step < end:  # more than once if a step has to be taken again
        for shares in collect_garbage_between(progress.clock.timed(train.steps(progress.epoch, progress.step, end))):
            state.train_step(shares, *progress.requests())
            is_last = progress.step == end
            asked = progress.end_step(state, is_last or progress.step % log_interval == 0)
            if asked.bad_step is not None:
                break
            is_seen = progress.step == len(train) and link.is_heard and state.log_gradients
            if is_seen and (histograms := state.gradient_histograms()):
                link.emit(GradientsSeen(progress.epoch, histograms))
            progress.save_or_stop(state, asked, is_evaluation_next=is_last)
