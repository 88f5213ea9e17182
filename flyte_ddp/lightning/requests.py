"""Requests of any rank to stop or to save, which all ranks learn at the same step."""

from typing import NamedTuple

import torch
from torch import distributed

from flyte_ddp.engine.readback import Readback
from flyte_ddp.engine.step import constants


class Asked(NamedTuple):
    """Whether any rank has asked for something."""

    stop: bool
    save: bool


class Requests:
    """The ranks' requests, exchanged once in each step.

    On a GPU the host reads the answer of an earlier step, the same on all ranks, so it doesn't wait for the device.

    Attributes:
        readback: what the host reads.
    """

    def __init__(self, device: torch.device):
        self._device, self._is_alone = device, distributed.get_world_size() == 1
        self.readback = Readback(device)

    def exchange(self, stop: bool, save: bool) -> Asked:
        """Return what any rank asks for; a collective.

        Args:
            stop: whether this rank was asked to stop.
            save: whether this rank wants a checkpoint.
        """
        if self._is_alone:
            return Asked(stop, save)
        counts = constants((float(stop), float(save)), self._device).clone()
        distributed.all_reduce(counts)
        self.readback.copy(0, counts)
        read = self.readback.read()
        return Asked(*(count > 0 for count in read[1])) if read else Asked(stop=False, save=False)
