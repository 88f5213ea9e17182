"""The sums since the last evaluation, over all ranks: what steps have measured, and what ranks have asked for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flyte_ddp.engine.readback import Readback
from flyte_ddp.engine.step import Totals


@dataclass(frozen=True)
class Sums:
    """The sums since the last evaluation, over all ranks.

    Attributes:
        pairs: value and weight of each measure, alternating.
        step: the number of the epoch's steps so far.
        steps: the number of the epoch's steps before the first that was not finite.
        stop: whether any rank was asked to stop.
        saves: how often rank 0 wanted a checkpoint.
        seconds: the duration of the epoch's steps.
    """

    pairs: tuple[float, ...]
    step: int
    steps: int
    stop: bool
    saves: int
    seconds: float

    def since(self, before: "Sums") -> tuple[float, ...]:
        return tuple(now - then for now, then in zip(self.pairs, before.pairs, strict=True))

    def asks(self, before: "Sums") -> bool:
        """Return whether a step since those sums was not finite, or a rank has asked to stop or to save."""
        return self.steps < self.step or self.stop or self.saves > before.saves


class StepSums:
    """The sums on the device, to which each step adds.

    Attributes:
        values: value and weight of each measure, alternating; then the numbers of steps at which a rank asked to stop,
            at which rank 0 asked to save, and that were bad.
        readback: copies the sums to the host.
    """

    def __init__(self, measures: int, device: torch.device):
        self.values = torch.zeros(2 * measures + 3, dtype=torch.float64, device=device)
        self._parts = self.values.split([2 * measures, 2, 1])
        self.readback = Readback(device)

    def add(self, totals: Totals, flag: Tensor) -> None:
        """Add a step to the sums on the device. The host does not wait.

        A step whose flag is 1 is added, too, and may make the sums NaN or infinite.

        Args:
            totals: the step's sums over all ranks, on the device.
            flag: a scalar tensor on the device: 1 if a loss or gradient of this step or of an earlier one was not
                finite, otherwise 0.
        """
        measured, asked, bad = self._parts
        measured.add_(totals.measured)
        asked.add_(totals.asked)
        bad.add_(flag)

    def now(self, step: int, seconds: float) -> Sums:
        """Return the sums up to the newest step of the epoch, and drop the copies that recent() has started.

        The host waits for the device.
        """
        self.readback.clear()
        return _make_sums(step, self.values.tolist(), seconds)

    def recent(self, step: int, seconds: float) -> Sums | None:
        """Start to copy the newest sums to the host, and return the sums of some steps ago, which have arrived there.

        On a CPU these are the newest sums. On a GPU the host waits at most until the device has reached that older
        step, which is the same on all ranks.

        Args:
            step: the number of the newest step.
            seconds: the time of the steps so far, for the result.

        Returns:
            The sums; None if there were too few steps since now() was last called.
        """
        self.readback.copy(step, self.values)
        copied = self.readback.read()
        return _make_sums(*copied, seconds) if copied else None


def _make_sums(step: int, values: list[float], seconds: float) -> Sums:
    *pairs, stop, saves, bad_steps = values
    return Sums(tuple(pairs), step, step - round(bad_steps), stop > 0, round(saves), seconds)
