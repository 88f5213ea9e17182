"""A clock that tells a rank's waiting for its data, computing, and waiting for the other ranks apart."""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import distributed

from flyte_ddp.engine.batches.batches import Batch

MOST_MARKS = 256  # with more marks than this, those that the device has reached are added up


class StepPart(IntEnum):
    """A part of a rank's time. OTHER is the time between two steps: evaluations, checkpoints, log lines."""

    DATA = 0
    COMPUTING = 1
    WAITING = 2
    OTHER = 3


class _Moment:
    """A moment on the host's clock, with the methods of torch.cuda.Event."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "_Moment") -> float:
        return (later.seconds - self.seconds) * 1e3


class StepClock:
    """A clock that splits a rank's time at marks into waiting for data, computing, and waiting for other ranks.

    On a GPU the marks are events in its stream, so the host does not wait for them, and the time is the device's own.
    Data that come while the device still computes cost no time.

    Attributes:
        steps, samples: their numbers since the last call of read_all or timed.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: deque[tuple[StepPart, Any]] = deque()
        self._set_to_zero()

    def lap(self, part: StepPart) -> None:
        """Set a mark, and count the time since the mark before as this part of a step."""
        mark = torch.cuda.Event(enable_timing=True) if self._device.type == "cuda" else _Moment()
        mark.record()
        self._marks.append((part, mark))
        if len(self._marks) > MOST_MARKS:
            self._add_up()

    def timed(self, steps: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield each step's batches for this rank, and count the time to fetch them as waiting for data.

        When the first step is asked for, the clock begins anew. The time between the end of a step and the next fetch
        counts as OTHER.
        """
        self._marks.clear()
        self._set_to_zero()
        coming = iter(steps)
        while True:
            self.lap(StepPart.OTHER)
            shares = next(coming, None)
            self.lap(StepPart.DATA)
            if shares is None:
                return
            self.samples += sum(share.share.count for share in shares)
            self.steps += 1
            yield shares

    def read_all(self) -> np.ndarray:
        """Return all ranks' times since the last call of read_all or timed, and set the clock to zero; a collective.

        Call it after the host has waited for the device; else the times of the latest steps are missing.

        Returns:
            (ranks, 4) float64, the same on all ranks: seconds of waiting for data (DATA), of computing (COMPUTING) and
            of waiting for other ranks (WAITING), and the number of samples that the rank has computed, with borrowed
            ones.
        """
        self._add_up()
        local = torch.zeros(distributed.get_world_size(), 4, dtype=torch.float64)
        local[distributed.get_rank()] = torch.tensor(
            [*self._seconds[: StepPart.OTHER], self.samples], dtype=local.dtype
        )
        self._set_to_zero()
        if len(local) == 1:
            return local.numpy()
        gathered = local.to(self._device)
        distributed.all_reduce(gathered)
        return gathered.cpu().numpy()

    def _set_to_zero(self) -> None:
        self._seconds = [0.0] * len(StepPart)
        self.samples = self.steps = 0

    def _add_up(self) -> None:
        """Add the times between the marks that the device has reached to those of their parts, and drop these marks."""
        reached = list(itertools.takewhile(lambda mark: mark[1].query(), self._marks))
        for (_, before), (part, after) in itertools.pairwise(reached):
            self._seconds[part] += before.elapsed_time(after) / 1e3
            self._marks.popleft()
