"""The batches of a loop of the user's own."""

from collections.abc import Iterator
from typing import Any

from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.batches.splits import Split
from flyte_ddp.engine.garbage import collect_garbage_between
from flyte_ddp.engine.own_loop.agreement import Call
from flyte_ddp.engine.own_loop.parts import Parts
from flyte_ddp.engine.own_loop.state import LoopState
from flyte_ddp.engine.seeds import generator_states, put_back_generators, seed_all, seed_part
from flyte_ddp.engine.stop_poll import StopPoll
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.random_numbers import Use, derive_key
from flyte_ddp.settings import TrainingSettings

UNTRAINED = "to pass over the data without training, as update_bn does, take loop.evaluation(data)"


class TrainSteps:
    """The batches that loop.batches returns: this rank's tensors of each step, or with virtual ranks its Parts.

    A step begins when its batch is yielded. LoopState.end_step() ends the step when the next batch is asked for.
    """

    def __init__(self, split: Split, settings: TrainingSettings, environment: Environment, state: LoopState):
        name = f"{type(settings).__name__}.batch_size"
        size = settings.batch_size
        ranks = environment.world.size
        if size % ranks and not settings.virtual_ranks:
            raise InputError(
                f"{name} must be a multiple of the number of ranks ({ranks}) in a loop of your own, got {size}: "
                "DistributedDataParallel weighs the ranks alike, so change one of them, or write a recipe"
            )
        if size > len(split):
            raise InputError(f"{name} must be at most the number of samples ({len(split)}), got {size}: lower it")
        parts = settings.virtual_ranks
        if parts and size % parts:
            raise InputError(
                f"{name} must be a multiple of virtual_ranks ({parts}) in a loop of your own, got {size}: the mean of "
                "its parts weighs them alike, so change one of them, or write a recipe"
            )
        self._state, self._rank, self._settings = state, environment.rank, settings
        self._batches = TrainBatches(split, size, settings.seed, self._rank, ranks, virtual_ranks=parts)
        if not state.batches:  # until one is iterated over, the first counts
            state.batches, state.steps = self._batches, len(self)

    def __len__(self) -> int:
        return len(self._batches.split) // self._batches.batch_size

    def __iter__(self) -> Iterator[Any]:
        return _OneEpoch(self._steps(), self._state)

    def _steps(self) -> Iterator[Any]:
        state = self._state
        if state.progress.started is None or state.is_over or state.progress.epoch == self._settings.epochs:
            raise InputError(f"iterate over loop.batches within `for epoch in loop.epochs():`; {UNTRAINED}")
        is_other = state.trains_on not in (None, self) and (state.progress.step or state.logged)
        if is_other or (state.is_stepping and not state.logged):
            raise InputError(
                "iterate over loop.batches in one loop at a time, and over those of one call in an epoch: put several "
                "data sets into one, such as torch.utils.data.StackDataset or ConcatDataset"
            )
        if state.logged:  # the steps were left in the middle of an epoch
            state.end_step()
        if state.trains_on is self and state.progress.step == len(self):
            raise InputError(
                f"iterate over loop.batches once an epoch, got another time after all {len(self)} steps: count it as "
                f"an epoch of its own, in {type(self._settings).__name__}.epochs; {UNTRAINED}"
            )
        state.trains_on, state.batches, state.steps = self, self._batches, len(self)
        if state.audit:
            state.audit.train = self._batches
        state.put_back()
        steps = self._batches.steps(state.progress.epoch, state.progress.step, len(self))
        try:
            for shares in collect_garbage_between(state.progress.clock.timed(steps)):
                state.begin_step(shares)
                if self._batches.virtual_ranks:
                    seed_all(state.step_seed)
                    yield Parts(shares)
                else:
                    seed_part(state.step_seed, self._rank)
                    yield shares[0].tree
                state.end_step()
        finally:  # also if the loop is left
            state.is_stepping = False
            if state.trace and not state.exact:
                state.trace.end_part(state.logged.get("loss"))
            # Outside of steps all ranks draw alike
            seed_all(derive_key(Use.OWN_STEP, self._settings.seed, state.progress.epoch, state.progress.step))


class _OneEpoch(Iterator[Any]):
    """An iterator over the steps of one epoch, that in which the first step is asked for.

    In a later epoch it raises InputError, or that epoch would train on the rest of this one, which may be nothing.
    """

    def __init__(self, steps: Iterator[Any], state: LoopState):
        self._steps, self._state = steps, state
        self._epoch: int | None = None

    def __next__(self) -> Any:
        epoch = self._state.progress.epoch
        if self._epoch not in (None, epoch):
            raise InputError(
                f"an iterator over loop.batches has the steps of one epoch, got it again in epoch {epoch + 1}: "
                "call iter(batches) within `for epoch in loop.epochs():`"
            )
        self._epoch = epoch
        return next(self._steps)


class Evaluation:
    """The batches that loop.evaluation returns: this rank's tensors, or with virtual ranks those of one part at a time.

    Iterating over it gives all ranks rank 0's buffers, seeds what each batch draws, and stops the training if that is
    requested; a collective.
    """

    def __init__(
        self,
        split: Split,
        settings: TrainingSettings,
        environment: Environment,
        link: Link,
        state: LoopState,
    ):
        rank, ranks, parts = environment.rank, environment.world.size, settings.virtual_ranks
        self._batches = EvaluationBatches(split, settings.test_batch_size, rank, ranks, virtual_ranks=parts)
        self._link, self._state, self._seed = link, state, settings.seed
        state.evaluation_sizes.append(len(split))

    def __len__(self) -> int:
        """Return how many batches this rank is given; with virtual ranks, each part of a global batch counts as one."""
        return self._batches.shares()

    def __iter__(self) -> Iterator[Any]:
        state = self._state
        parts = self._batches.virtual_ranks
        outer = state.part
        if any(buffers.now() for buffers in state.buffers):
            state.agree(Call.EVALUATION)
            state.share_buffers()  # as after each step
        before = state.parts.buffer_digests() if parts else {}
        in_step = generator_states() if state.is_stepping else None
        state.is_cut = True
        # Within a step there is no stop: the step is ended first
        poll = None if state.is_stepping else StopPoll(state.device, state.all_evaluate)
        try:
            for shares in self._batches.steps():
                for batch in shares:
                    self._link.heartbeat()
                    if not batch.share.borrowed:
                        seed_part(batch.seed, batch.share.part)
                        state.part = batch.share.part if parts else 0
                        yield batch.tree
                if poll and poll.after_batch(self._link.stop_requested):
                    state.leave_evaluation()
                    poll = None  # it could not be left
            state.is_cut = False
        finally:
            state.part = outer
            if in_step:
                put_back_generators(in_step)  # the step draws as if there had been no evaluation
            else:
                # All ranks draw alike again, however many batches each has had, and after a resume, too
                step = state.progress.step if state.trains_on else 0
                seed_all(derive_key(Use.OWN_STEP, self._seed, state.progress.epoch, step, 1))
        now = state.parts.buffer_digests() if parts else {}
        moved = [name for name, digest in before.items() if now.get(name) != digest]
        if moved:
            raise InputError(
                f"with virtual_ranks an evaluation must leave buffers as they are, and it changes {moved[0]}, by the "
                "samples of its rank: call model.eval() before it, and compute statistics, as update_bn does, from "
                "data that all ranks have alike"
            )
