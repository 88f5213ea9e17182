"""Requests of any rank to stop or to save, of which all ranks hear at the same step."""

from typing import NamedTuple

import torch
from torch import distributed

from flyte_ddp.engine.readback import MOST_STEPS, Readback
from flyte_ddp.engine.step import constants

MOST_SECONDS = 0.1  # between two exchanges, unless a step takes longer


class Asked(NamedTuple):
    """Whether any rank has asked for something."""

    stop: bool
    save: bool


class Requests:
    """The ranks' requests, exchanged in each step, or in one step of several short ones.

    On a GPU the host reads the answer of an earlier exchange, the same on all ranks, so it doesn't wait for the device.
    """

    def __init__(self, device: torch.device, seconds: float):
        """seconds: by how much an answer may be late."""
        self._device, self._is_alone = device, distributed.get_world_size() == 1
        self._seconds = min(seconds, MOST_SECONDS)
        self._steps, self._every = 0, 1
        self._readback = Readback(device)

    def keep_pace(self, step_seconds: float) -> None:
        """Choose how often requests are exchanged. step_seconds: of recent steps, the same on all ranks."""
        self._every = max(1, min(MOST_STEPS, int(self._seconds / max(step_seconds, 1e-9))))

    def forget(self) -> None:
        """Forget what was asked before a checkpoint was saved."""
        self._readback.clear()

    def exchange(self, stop: bool, save: bool) -> Asked:
        """Return what any rank asks for; a collective.

        Args:
            stop: whether this rank was asked to stop.
            save: whether this rank wants a checkpoint.
        """
        if self._is_alone:
            return Asked(stop, save)
        self._steps += 1
        if self._steps % self._every:
            return Asked(stop=False, save=False)
        counts = constants((float(stop), float(save)), self._device).clone()
        distributed.all_reduce(counts)
        self._readback.copy(0, counts)
        read = self._readback.read()
        return Asked(*(count > 0 for count in read[1])) if read else Asked(stop=False, save=False)
