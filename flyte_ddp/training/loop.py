"""The training loop: the file to read first. The same code for one CPU process, one GPU or N GPUs on M nodes."""

import time
from typing import List, Protocol, Tuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from flyte_ddp.training.batches import TestBatches, TrainBatches
from flyte_ddp.training.errors import NonFinite, StopRequested
from flyte_ddp.training.events import EpochFinished, Event, GradientsSeen, StepLogged
from flyte_ddp.training.state import Sums, TrainingState


class Link(Protocol):
    """What the loop knows of the world outside. Whether its events arrive anywhere is not the loop's concern."""

    stop_requested: bool

    def emit(self, event: Event) -> None: ...

    def alive(self) -> None:
        """Called after each step by each rank, so that a hang can be told from slow work."""


class Checkpoints(Protocol):
    def due(self) -> bool: ...

    def save(self, state: TrainingState) -> None: ...


def fit(
    state: TrainingState,
    train: TrainBatches,
    test: TestBatches,
    epochs: int,
    log_interval: int,
    link: Link,
    checkpoints: Checkpoints,
) -> Tensor:
    """Trains from where the state stands to the end of the last epoch; the metrics end up in state.history.

    Returns the log-probabilities (n, classes) of this rank's share of the test split.
    """
    scores = None
    while state.epoch < epochs:
        sums = train_epoch(state, train, log_interval, link, checkpoints)
        started = time.perf_counter()
        test_loss, accuracy, scores = evaluate(state.evaluated, test, link)
        finished = EpochFinished(
            epoch=state.epoch,
            samples=train.samples,
            train_loss=sums.loss / train.samples,
            train_accuracy=sums.correct / train.samples,
            test_loss=test_loss,
            accuracy=accuracy,
            train_seconds=state.epoch_seconds,
            evaluate_seconds=time.perf_counter() - started,
        )
        state.finish_epoch(finished)
        link.emit(finished)
        for warning in state.watch.after_epoch(finished.epoch, len(train), test_loss):
            link.emit(warning)
        checkpoints.save(state)
    if scores is None:  # a finished training, gone on from
        _, _, scores = evaluate(state.evaluated, test, link)
    return scores


def train_epoch(
    state: TrainingState, train: TrainBatches, log_interval: int, link: Link, checkpoints: Checkpoints
) -> Sums:
    """Steps through what is left of the epoch; returns its metrics.

    Raises StopRequested, after a checkpoint, where any rank was asked to stop, and NonFinite, the weights being those
    from before the bad step; either on all ranks at the same step.
    """
    # A CPU can look at the metrics after every step; a look at a GPU makes the host wait for it, so it has to be rare
    look_interval = 1 if state.device.type == "cpu" else log_interval
    state.ddp.train()
    sums = logged = state.sums()
    seconds_before, started = state.epoch_seconds, time.perf_counter()
    logged_seconds = seconds_before
    for batch in train.epoch(state.epoch, state.step):
        state.train_step(batch, link.stop_requested)
        link.alive()
        is_last = state.step == len(train)
        if state.step % look_interval and not is_last:
            continue
        sums = state.sums()
        state.epoch_seconds = seconds_before + time.perf_counter() - started
        if sums.steps < state.step:
            again = next(train.epoch(state.epoch, sums.steps))
            raise NonFinite(*state.find_non_finite(again), state.epoch, sums.steps)
        if state.step % log_interval == 0 or is_last:
            event = _logged(state, train, logged, sums, state.epoch_seconds - logged_seconds)
            link.emit(event)
            samples = event.samples - train.samples_until(logged.steps)
            for warning in state.watch.after_steps(state.epoch, state.step, event.loss, samples):
                link.emit(warning)
            logged, logged_seconds = sums, state.epoch_seconds
            if is_last:
                link.emit(GradientsSeen(state.epoch, state.gradient_histograms()))
        if sums.stop:
            checkpoints.save(state)
            raise StopRequested(state.epoch, state.step)
        if checkpoints.due() and not is_last:
            checkpoints.save(state)
    return sums


def _logged(state: TrainingState, train: TrainBatches, before: Sums, now: Sums, seconds: float) -> StepLogged:
    samples = train.samples_until(now.steps) - train.samples_until(before.steps)
    return StepLogged(
        epoch=state.epoch,
        step=state.step,
        samples=train.samples_until(now.steps),
        loss=(now.loss - before.loss) / samples,
        accuracy=(now.correct - before.correct) / samples,
        learning_rate=state.learning_rate,
        samples_per_second=samples / seconds,
        gradient_norms=state.gradient_norms(),
    )


@torch.inference_mode()
def evaluate(model: nn.Module, test: TestBatches, link: Link) -> Tuple[float, float, Tensor]:
    """Mean loss and accuracy over the whole test split, in float32: each rank takes its share, the sums are exact.

    Third, the log-probabilities (n, classes) of this rank's share.
    """
    model.eval()
    mine: List[Tensor] = []
    sums = torch.zeros(2, dtype=torch.float64, device=test.split.device)
    for batch in test:
        scores = model(batch.images)
        mine.append(scores)
        sums[0] += F.nll_loss(scores, batch.labels, reduction="sum")
        sums[1] += (scores.argmax(1) == batch.labels).sum()
        link.alive()
    distributed.all_reduce(sums)
    loss, correct = sums.tolist()
    return loss / len(test.split), correct / len(test.split), torch.cat(mine)


@torch.inference_mode()
def gather(mine: Tensor, test: TestBatches) -> Tensor:
    """The rows (N, ...) of the whole test split, on every rank, from each rank's rows (n, ...) of its own share."""
    everyone = mine.new_zeros(len(test.split), *mine.shape[1:])
    everyone[test.first : test.last] = mine
    distributed.all_reduce(everyone)  # the others' rows are zeros
    return everyone
