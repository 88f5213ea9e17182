"""Agreement of all ranks on the batch at which they leave an evaluation, because one of them was asked to stop."""

import time
from collections.abc import Callable

import torch
from torch import distributed

from flyte_ddp.engine.readback import Readback

POLL_SECONDS = 0.5  # about so often


class StopPoll:
    """An exchange of stop requests, about every POLL_SECONDS in one evaluation, so that all ranks leave it together.

    The ranks time their batches, and exchange the times with the requests. So all choose the same batch for the next
    exchange. On a GPU the host reads the answer of the exchange before, and does not wait for the newest.

    Attributes:
        is_agreed: whether the ranks leave the evaluation.
    """

    def __init__(self, device: torch.device, is_shared: Callable[[], bool] = lambda: True):
        """Prepare the exchanges of one evaluation.

        Args:
            device: where the collective's tensors are.
            is_shared: returns whether all ranks still evaluate; the same on all ranks. It is called before each
                exchange. If it returns False, there are no more exchanges.
        """
        self.is_agreed = False
        self._is_shared = is_shared
        self._device = device
        self._size = distributed.get_world_size()
        self._every = 1  # batches from one exchange to the next
        self._batches = 0  # since the last exchange
        self._since = time.perf_counter()  # the time of the last exchange
        self._readback = Readback(device)

    def after_batch(self, stop: bool) -> bool:
        """Exchange stop requests if it is time, and return whether all ranks leave the evaluation now; a collective.

        Each rank calls it after each global batch, and all get the same answer. Several ranks leave some batches after
        the request. Nothing is exchanged any more once is_shared() has returned False.

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
        """Sum this rank's stop request and its seconds for a batch over all ranks; a collective.

        From the sums, the call sets is_agreed and the number of batches until the next exchange, alike on all ranks. On
        a GPU it uses the sums of the exchange before this one, so the host does not wait.
        """
        now = time.perf_counter()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # filled without a copy that the host awaits
        sums[0] = float(stop)
        sums[1] = (now - self._since) / self._batches
        self._batches = 0
        self._since = now
        distributed.all_reduce(sums)
        self._readback.copy(0, sums)
        read = self._readback.read()
        if read:
            stops, seconds = read[1]
            self.is_agreed = stops > 0
            pace = int(POLL_SECONDS * self._size / max(seconds, 1e-9))
            self._every = max(1, min(pace, 2 * self._every))  # at most doubled: the first batches may be the fastest
