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
        """Return whether the steps since the sums before call for something other than the next step."""
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
        """Add a step to the sums.

        Args:
            totals: what the step has measured, and what ranks asked for.
            flag: whether this step, or one before it, was bad.
        """
        measured, asked, bad = self._parts
        measured.add_(totals.measured)
        asked.add_(totals.asked)
        bad.add_(flag)

    def now(self, step: int, seconds: float) -> Sums:
        """Return the sums of the newest step; the host waits for the device."""
        self.readback.clear()
        return _make_sums(step, self.values.tolist(), seconds)

    def recent(self, step: int, seconds: float) -> Sums | None:
        """Return the sums of a recent step, the same on all ranks, without waiting; None if it was before now()."""
        self.readback.copy(step, self.values)
        copied = self.readback.read()
        return _make_sums(*copied, seconds) if copied else None


def _make_sums(step: int, values: list[float], seconds: float) -> Sums:
    *pairs, stop, saves, bad_steps = values
    return Sums(tuple(pairs), step, step - round(bad_steps), stop > 0, round(saves), seconds)
