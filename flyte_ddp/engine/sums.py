"""Sums since the last evaluation: what steps have measured, and what ranks have asked for, all ranks together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flyte_ddp.engine.readback import Readback
from flyte_ddp.engine.step import Totals


@dataclass(frozen=True)
class Sums:
    """Sums since the last evaluation, all ranks together.

    Attributes:
        pairs: value and weight of each measure, alternating.
        step: number of the epoch's steps so far.
        steps: number of the epoch's steps before the first that was not finite.
        stop: whether any rank was asked to stop.
        saves: how often rank 0 wanted a checkpoint.
        seconds: of the epoch's steps.
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
        """Whether the steps since then call for something other than the next one."""
        return self.steps < self.step or self.stop or self.saves > before.saves


class StepSums:
    """Adds them up on the device.

    Attributes:
        values: value and weight of each measure, alternating; then the numbers of steps to stop, to save, and that
            were bad.
    """

    def __init__(self, measures: int, device: torch.device):
        self.values = torch.zeros(2 * measures + 3, dtype=torch.float64, device=device)
        self._parts = self.values.split([2 * measures, 2, 1])
        self.readback = Readback(device)

    def add(self, totals: Totals, flag: Tensor) -> None:
        """flag: whether this step, or one before it, was bad."""
        measured, asked, bad = self._parts
        measured.add_(totals.measured)
        asked.add_(totals.asked)
        bad.add_(flag)

    def now(self, step: int, seconds: float) -> Sums:
        """Make the host wait for the device."""
        self.readback.clear()
        return _sums_of(step, self.values.tolist(), seconds)

    def recent(self, step: int, seconds: float) -> Sums | None:
        """Return the sums of a recent step, the same on all ranks, without waiting; None if it was before now()."""
        self.readback.copy(step, self.values)
        copied = self.readback.read()
        return _sums_of(*copied, seconds) if copied else None


def _sums_of(step: int, values: list[float], seconds: float) -> Sums:
    *pairs, stop, saves, bad_steps = values
    return Sums(tuple(pairs), step, step - round(bad_steps), stop > 0, round(saves), seconds)
