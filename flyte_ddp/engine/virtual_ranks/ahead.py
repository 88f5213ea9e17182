"""Steps by virtual ranks in which the host does not wait for the device, and the way back before one of them.

Only the device knows whether the gradients of such a step fit their units. If they do not, a flag on the device keeps
this step and all later ones from changing weights and optimizer. The host learns it some steps later. It restores what
these steps have changed nevertheless, and takes the first of them again, waiting this time.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from flyte_ddp.engine.buffers import BufferCopy
from flyte_ddp.engine.step import Totals
from flyte_ddp.engine.sums import StepSums
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep

DEVICES = ("cuda",)  # the types of devices that the host can be ahead of
WAITS = 100  # steps that wait after one was taken again, so that even many of these cost little


class Before(NamedTuple):
    """Values from before a step that the step changes in spite of the flag.

    Attributes:
        buffers: the network's buffers.
        grid: the exponents of ExactStep.grid.
        sums: StepSums.values.
    """

    buffers: BufferCopy
    grid: Tensor | None
    sums: Tensor


class Ahead:
    """The latest steps in which the host was ahead of the device, by their number in the whole training, from 0."""

    def __init__(self, step: ExactStep):
        self._step = step
        self._before: dict[int, Before] = {}
        self._first = 0  # the number of the first step that may be ahead

    def may(self, number: int) -> bool:
        """Return whether the host need not wait in this step: there are units for it, and none was wrong recently."""
        return self._step.knows_units and number >= self._first

    def add_up_gradients(
        self, number: int, backward: Callable[[], None], buffers: BufferCopy, sums: StepSums
    ) -> Totals:
        """Add up a step's gradients without waiting for the device, and store what go_back() needs; a collective.

        Args:
            number: the number of the step in the whole training, from 0.
            backward: runs the forward and backward passes of the rank's parts.
            buffers: a copy of the network's buffers from before the step.
            sums: the progress' sums, to which the step is not added yet.

        Returns:
            The sums of measures and requests over all ranks, and the norms of the summed gradients. All norms are NaN
            if the gradients are not final: then call go_back(), and take the step again.
        """
        self._before[number] = Before(buffers, self._step.grid, sums.values.clone())
        while len(self._before) > sums.readback.behind + 2:  # the host knows of earlier ones that they were final
            del self._before[min(self._before)]
        return self._step.add_up_ahead(backward)

    def go_back(self, number: int, sums: StepSums) -> bool:
        """Restore the buffers, the units of ExactStep and the progress' sums as they were before a step.

        Afterwards, may() returns False for this step and the WAITS steps after it.

        Args:
            number: the number of the step in the whole training, from 0.
            sums: the progress' sums, which are overwritten.

        Returns:
            True; or False, without any change, if the host was not ahead in this step.
        """
        before = self._before.get(number)
        if not before:
            return False
        before.buffers.put_back()
        sums.values.copy_(before.sums)
        self._step.grid = before.grid
        self._step.repeated += 1
        self._before.clear()
        self._first = number + 1 + WAITS
        return True
