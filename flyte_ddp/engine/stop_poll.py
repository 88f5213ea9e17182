"""Agreement of all ranks on the batch at which they leave an evaluation, because one of them was asked to stop."""

import time
from collections.abc import Callable

import torch
from torch import distributed

from flyte_ddp.engine.readback import Readback

POLL_SECONDS = 0.5  # about so often


class StopPoll:
    """The question whether any rank was asked to stop, which ranks ask one another now and then in one evaluation.

    When they ask follows from what they have exchanged, so all ask after the same batch. On a GPU the host reads the
    answer before the last one, which is the same on all ranks, too, and does not wait for the newest.

    Attributes:
        is_agreed: whether the ranks leave the evaluation.
    """

    def __init__(self, device: torch.device, is_shared: Callable[[], bool] = lambda: True):
        """Prepare the question.

        Args:
            device: where the collective's tensors are.
            is_shared: called before each exchange; returns whether all ranks still evaluate. If not, the ranks ask no
                more.
        """
        self.is_agreed, self._is_shared = False, is_shared
        self._device, self._size = device, distributed.get_world_size()
        self._every, self._batches, self._since = 1, 0, time.perf_counter()
        self._readback = Readback(device)

    def after_batch(self, stop: bool) -> bool:
        """Return whether all ranks leave the evaluation now. Each calls it after each global batch; a collective.

        Args:
            stop: whether this rank was asked to stop.
        """
        self._batches += 1
        if self._size == 1:
            self.is_agreed = stop
        elif self._batches == self._every and self._is_shared():
            self._exchange(stop)
        return self.is_agreed

    def _exchange(self, stop: bool) -> None:
        now = time.perf_counter()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # filled without a copy that the host awaits
        sums[0] = float(stop)
        sums[1] = (now - self._since) / self._batches
        self._batches, self._since = 0, now
        distributed.all_reduce(sums)
        self._readback.copy(0, sums)
        read = self._readback.read()
        if read:
            stops, seconds = read[1]
            self.is_agreed = stops > 0
            pace = int(POLL_SECONDS * self._size / max(seconds, 1e-9))
            self._every = max(1, min(pace, 2 * self._every))  # the first batches may be faster than others

    def at_end(self, stop: bool) -> bool:
        """Return whether any rank was asked to stop by the end of the evaluation; a collective."""
        if self._size == 1:
            return stop
        stops = torch.tensor(float(stop), device=self._device)
        distributed.all_reduce(stops)
        return bool(stops)
