"""The batches of a loop of the user's own."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from flyte_ddp.engine import rank_0s
from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.batches.splits import Split
from flyte_ddp.engine.garbage import collected_between
from flyte_ddp.engine.own_loop.agreement import Call
from flyte_ddp.engine.own_loop.parts import Parts
from flyte_ddp.engine.own_loop.progress import Progress
from flyte_ddp.engine.seeds import seed_all, seed_part
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.random_numbers import Use, key_of
from flyte_ddp.settings import TrainingSettings

UNTRAINED = "to pass over the data without training, as update_bn does, take loop.evaluation(data)"


class TrainSteps:
    """A rank's trees of tensors, step by step; what belongs to a step is ended when the next one is asked for."""

    def __init__(self, split: Split, settings: TrainingSettings, environment: Environment, progress: Progress):
        name, size, ranks = f"{type(settings).__name__}.batch_size", settings.batch_size, environment.world.size
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
        self._progress, self._rank, self._settings = progress, environment.rank, settings
        self._batches = TrainBatches(split, size, settings.seed, self._rank, ranks, virtual_ranks=parts)
        if not progress.batches:  # until one is iterated over, the first counts
            progress.batches, progress.steps = self._batches, len(self)

    def __len__(self) -> int:
        return len(self._batches.split) // self._batches.batch_size

    def __iter__(self) -> Iterator[Any]:
        progress, key = self._progress, partial(key_of, Use.OWN_STEP, self._settings.seed)
        if not progress.is_started or progress.epoch == self._settings.epochs:
            raise InputError(f"iterate over loop.batches within `for epoch in loop.epochs():`; {UNTRAINED}")
        is_other = progress.trains_on not in (None, self) and (progress.step or progress.logged)
        if is_other or (progress.is_stepping and not progress.logged):
            raise InputError(
                "iterate over loop.batches in one loop at a time, and over those of one call in an epoch: put several "
                "data sets into one, such as torch.utils.data.StackDataset or ConcatDataset"
            )
        if progress.logged:  # the steps were left in the middle of an epoch
            progress.end_step()
        if progress.trains_on is self and progress.step == len(self):
            raise InputError(
                f"iterate over loop.batches once an epoch, got another time after all {len(self)} steps: count it as "
                f"an epoch of its own, in {type(self._settings).__name__}.epochs; {UNTRAINED}"
            )
        progress.trains_on, progress.batches, progress.steps = self, self._batches, len(self)
        progress.put_back()
        steps = self._batches.steps(progress.epoch, progress.step, len(self))
        try:
            for shares in collected_between(progress.clock.timed(steps)):
                progress.begin_step()
                if self._batches.virtual_ranks:
                    seed_all(progress.step_seed)
                    yield Parts(shares)
                else:
                    seed_part(progress.step_seed, self._rank)
                    yield shares[0].tree
                progress.end_step()
        finally:  # also if the loop is left
            progress.is_stepping = False
            seed_all(key(progress.epoch, progress.step))  # outside of steps all ranks draw alike


class Evaluation:
    """A rank's trees of tensors for one evaluation."""

    def __init__(
        self,
        split: Split,
        settings: TrainingSettings,
        environment: Environment,
        link: Link,
        progress: Progress,
    ):
        rank, ranks, parts = environment.rank, environment.world.size, settings.virtual_ranks
        self._batches = EvaluationBatches(split, settings.test_batch_size, rank, ranks, virtual_ranks=parts)
        self._link, self._progress, self._seed = link, progress, settings.seed
        progress.test_samples += len(split)

    def __len__(self) -> int:
        """Return how many this rank has; with virtual ranks, each part of a batch is one."""
        return self._batches.shares()

    def __iter__(self) -> Iterator[Any]:
        if buffers := [buffer for model in self._progress.wrapped for buffer in model.buffers()]:
            self._progress.agree(Call.EVALUATION)
            rank_0s.take(buffers)  # as before each step
        progress, parts, outer = self._progress, self._batches.virtual_ranks, self._progress.part
        versions = progress.buffer_versions() if parts else {}
        progress.is_cut = True
        try:
            for batch in self._batches:
                self._link.heartbeat()
                if not batch.share.borrowed:
                    if not progress.is_stepping:  # a step's own numbers go on
                        seed_part(batch.seed, batch.share.part)
                    progress.part = batch.share.part if parts else 0
                    yield batch.tree
            progress.is_cut = False
        finally:
            progress.part = outer
            if not progress.is_stepping:
                # All ranks draw alike again, however many batches each has had, and after a resume, too
                step = progress.step if progress.trains_on else 0
                seed_all(key_of(Use.OWN_STEP, self._seed, progress.epoch, step, 1))
        moved = [name for name, version in versions.items() if progress.buffer_versions().get(name) != version]
        if moved:
            raise InputError(
                f"with virtual_ranks an evaluation must leave buffers as they are, and it changes {moved[0]}, by the "
                "samples of its rank: call model.eval() before it, and compute statistics, as update_bn does, from "
                "data that all ranks have alike"
            )
