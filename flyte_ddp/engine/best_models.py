"""The weights of the best evaluations, each in a file of its own beside the checkpoint, until training has ended.

So a checkpoint does not grow by them, and each is written, and uploaded, once. Which evaluations are kept follows from
their measures, which a checkpoint has, and from the files that are there.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torch import Tensor, distributed

from flyte_ddp.engine.collectives import broadcast_value
from flyte_ddp.engine.job import Job, KeptModel
from flyte_ddp.engine.monitor.best_tracker import BestTracker
from flyte_ddp.engine.progress import Progress
from flyte_ddp.engine.sharding.sharded_state import Shard
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event, Observer
from flyte_ddp.manifest import models_beside
from flyte_ddp.text import counted
from flyte_ddp.whole_files import link_or_copy, writing_to

Weights = Mapping[str, Tensor | Shard]


class Choosing(Protocol):
    """A training that knows which of its evaluations is the best so far."""

    progress: Progress
    best_tracker: BestTracker | None

    def evaluated_weights(self) -> Weights:
        """Return the weights that are evaluated."""
        ...

    def best_weights(self) -> Weights:
        """Return the weights of the best evaluation so far."""
        ...


class BestModels(Observer):
    """The best evaluations so far, options.keep_best at most, the best first; the same on all ranks.

    A file that is no longer among them is removed when there is a checkpoint that does without it, so that training
    resumes from any checkpoint with all that it had.
    """

    def __init__(
        self,
        training: Choosing,
        job: Job,
        emit: Callable[[Event], None],
        write: Callable[[Path, dict[str, float], Weights], object],
    ):
        """Find the files of evaluations that were kept before a resume; a collective.

        If the best evaluation has no file, as after a training without keep_best, its weights are written.

        Args:
            training: the training, with its best evaluation so far, if there is one.
            job: names the files, and says how many evaluations are kept.
            emit: receives an event if a file cannot be written.
            write: write(path, measures, weights) writes a file on rank 0; a collective. Rank 0 alone may raise OSError.
        """
        assert training.best_tracker
        self._training = training
        self._tracker = training.best_tracker
        self._write = write
        self._job = job
        self._emit = emit
        self._folder = models_beside(Path(job.checkpoint_path or "another host's"))
        self._is_first = distributed.get_rank() == 0
        if self._is_first:
            with suppress(OSError):  # whoever writes into it meets that, too
                self._folder.mkdir(exist_ok=True)
        numbers = broadcast_value(self._on_disk() if self._is_first else [])
        self._kept = self._best(number for number in numbers if number < len(training.progress.history))
        if self._tracker.weights is not None and self._tracker.best not in self._kept:
            self._keep(self._tracker.best, training.best_weights())

    def after_evaluation(self) -> None:
        """Write the weights that have just been evaluated, if they are among the best; a collective."""
        # on_checkpoint_written() must not yet see this evaluation, which that checkpoint lacks
        self._training.progress.close()
        self._keep(len(self._training.progress.history) - 1, self._training.evaluated_weights())

    def on_checkpoint_written(self, event: CheckpointWritten) -> None:
        """Remove the files that are no longer among the best, which the checkpoint just written does not need."""
        kept = {self._file(number) for number in self._kept}
        for file in self._folder.glob("*.pt") if self._is_first else ():
            if file not in kept:
                with suppress(OSError):  # an error would keep the parent from hearing of the checkpoint
                    file.unlink()

    def publish(self) -> list[KeptModel]:
        """Link or copy the files of the best models into the folder job.logs, at the end of a training.

        Rank 0 does so, after remove_earlier() of results.py. A model whose file is missing, because it could not be
        written, is left out.

        Returns:
            On rank 0, a description of each file, the best first. On the other ranks, an empty list.

        Raises:
            InputError: The folder cannot be written to. Rank 0 alone raises it.
        """
        if not self._is_first:
            return []
        logs = Path(self._job.logs)
        models: list[KeptModel] = []
        measure = self._tracker.measure
        with writing_to(logs, self._job.chosen_by):
            for number in filter(lambda number: self._file(number).exists(), self._kept):
                epoch = self._training.progress.history[number]
                name = f"best-{len(models) + 1}-epoch-{counted(epoch.position)}.pt"
                link_or_copy(self._file(number), logs / name)
                models.append(KeptModel(name, epoch.position, measure, epoch.validation[measure]))
        return models

    def _keep(self, number: int, weights: Weights) -> None:
        """Write the weights of an evaluation to a file, if the evaluation is among the best so far; a collective.

        At most options.keep_best evaluations are the best, so another one may drop out. After the next checkpoint its
        file is deleted. If rank 0 cannot write a file, CheckpointFailed is emitted, nothing drops out, and training
        goes on.

        Args:
            number: the number of the evaluation in the training's history, from 0.
            weights: the weights that were evaluated; of a sharded weight, this rank's rows.
        """
        before = self._kept
        self._kept = self._best([*before, number])
        if number not in self._kept:
            return
        epoch = self._training.progress.history[number]
        file = self._file(number)
        is_written = True
        try:
            self._write(file, epoch.validation, weights)
        except OSError as error:  # training need not fail because a disk does
            is_written = False
            self._emit(CheckpointFailed(f"{file}, epoch {counted(epoch.position)} for keep_best: {error.strerror}"))
        if not broadcast_value(is_written):
            self._kept = before

    def _best(self, numbers: Iterable[int]) -> list[int]:
        """Return the numbers of the best of these evaluations, options.keep_best at most, the best first.

        The tracker's measure decides. Of equal evaluations, the earlier comes first. Evaluations whose measure is not
        finite are left out.

        Args:
            numbers: the numbers of evaluations in the training's history, from 0, in any order.
        """
        tracker = self._tracker
        history = self._training.progress.history
        sign = 1 if tracker.is_lower_better else -1
        values = {number: sign * history[number].validation.get(tracker.measure, math.nan) for number in {*numbers}}
        measured = [number for number, value in values.items() if math.isfinite(value)]
        return sorted(measured, key=lambda number: (values[number], number))[: self._job.options.keep_best]

    def _file(self, number: int) -> Path:
        return self._folder / f"{self._job.key}-{number + 1}.pt"

    def _on_disk(self) -> list[int]:
        """Return the numbers, from 0, of this training's evaluations that have a file."""
        names = [file.stem.split("-") for file in self._folder.glob(f"{self._job.key}-*.pt")]
        return [int(number) - 1 for _, number in names]
