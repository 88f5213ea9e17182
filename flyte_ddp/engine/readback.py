"""Values that the device has computed in each step, read by the host without waiting for the newest."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

AHEAD_SECONDS = 0.1  # of work that a device has left while the host is busy with something else
MOST_STEPS = 16  # that is ahead, as each has its batch


class Readback:
    """A queue of copies of a tensor, of which the host reads one that is some steps old.

    Each step copies the tensor to the host. The copy that is read is the same step's on all ranks, whenever each of
    their devices has come to it. So ranks that decide by values that all ranks have decide alike. On a CPU the copy is
    that of the step itself.

    Attributes:
        behind: how many steps old a copy is; also how far the host is ahead of the device at most, once it reads.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self.behind = 1 if self._is_cuda else 0
        self._copies: deque[tuple[int, Tensor, Any]] = deque()

    def keep_pace(self, step_seconds: float) -> None:
        """Set how many steps old the copies are that read() returns, so that the device has work for AHEAD_SECONDS.

        The duration of a recent step is the same on all ranks. On a CPU nothing changes.
        """
        if self._is_cuda:
            self.behind = max(1, min(MOST_STEPS, int(AHEAD_SECONDS / max(step_seconds, 1e-9))))

    def copy(self, step: int, tensor: Tensor) -> None:
        """Start to copy a step's tensor to the host, without waiting for the device.

        The caller may change the tensor as soon as this method has returned. A later call of read() may return the
        copy.
        """
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_cuda)
        copied.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event(blocking=True) if self._is_cuda else None
        if event:
            event.record()
        self._copies.append((step, copied, event))

    def read(self) -> tuple[int, list[float]] | None:
        """Return the copy that was made self.behind copies before the newest, and drop it and all older copies.

        The host waits until the device has made that copy. On a CPU self.behind is 0.

        Returns:
            The number of the copy's step, and the tensor's values as a list. None if there is no such copy, as right
            after clear() or after another read().
        """
        latest = None
        while len(self._copies) > self.behind:
            latest = self._copies.popleft()
        if not latest:
            return None
        step, copied, event = latest
        if event:
            event.synchronize()
        return step, copied.tolist()

    def clear(self) -> None:
        """Forget the copies that have not been read."""
        self._copies.clear()
