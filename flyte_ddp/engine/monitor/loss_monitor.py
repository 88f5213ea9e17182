"""The detection of a training that does not learn, from its losses. Standard library only."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from flyte_ddp.events import EpochFinished, NotLearning, SlowRank, Warned
from flyte_ddp.text import counted

GUESSING = 0.99  # above this share of a constant prediction's loss, a model counts as no better than guessing
EARLY, MOST_EARLY = 0.1, 3  # so early, by share of epochs and by number, a training may still be as bad as guessing
LEAP = 0.3  # a rise of the loss above its lowest by this share of a constant prediction's loss is a leap
WINDOW = 1000  # samples to average a loss over, at least: among fewer, a few hard ones would look like a leap


@dataclass
class LossMonitor:
    """The losses of a training, as far as they are needed to tell whether it learns. They are the same on all ranks.

    Attributes:
        constant_loss: mean loss of the best constant prediction; for classes, the entropy of their frequencies. 0 if
            unknown.
        epochs: the number of epochs; 0 if unknown.
        scale: the unit for leaps: the absolute value of constant_loss or, if unknown, of the first window's mean loss.
        lowest: the lowest mean training loss of any window since the last leap.
        loss_sum, samples: the sum of losses and the number of samples of the current window.
        guessing: whether the last evaluation was no better than the constant prediction.
        broken: split and name of each measure that was not finite.
        warnings: all warnings so far, those of slow ranks included.
        remedies: the end of each warning.
    """

    constant_loss: float = 0.0
    epochs: int = 0
    scale: float = 0.0
    lowest: float = math.inf
    loss_sum: float = 0.0
    samples: int = 0
    guessing: bool = False
    broken: list[str] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)
    remedies: str = "lower learning_rate, clip gradients by clip_norm, or raise warmup_fraction"

    def record(self, epoch: int, step: int, reasons: Iterable[str]) -> list[NotLearning]:
        """Record a warning for each of these reasons, which are sentences, and return them; the caller emits them."""
        warnings = [NotLearning(epoch, step, reason) for reason in reasons]
        self.warnings += warnings
        return warnings

    def after_steps(self, epoch: int, step: int, loss: float, samples: int) -> list[NotLearning]:
        """Record the mean training loss of the latest steps, and return a warning if the loss has leapt.

        Steps are collected into windows of at least WINDOW samples. The loss has leapt if a window's mean is above the
        lowest mean so far by more than LEAP times a unit. The unit is the absolute value of constant_loss or, if that
        is 0 (unknown), of the first window's mean. After a leap, the lowest mean begins anew with the window's, so a
        leap is reported once. The warning is also added to `warnings`; the caller emits it.

        Args:
            epoch: the epoch, from 0.
            step: the number of the epoch's steps so far.
            loss: the mean loss of these samples; NaN if no sample counts, and then nothing is recorded.
            samples: the number of samples since the last call.

        Returns:
            The warning in a list; an empty list if there is none.
        """
        if math.isnan(loss):
            return []
        self.loss_sum = self.loss_sum + loss * samples
        self.samples = self.samples + samples
        if self.samples < WINDOW:
            return []
        mean = self.loss_sum / self.samples
        before = self.lowest
        self.loss_sum, self.samples = 0.0, 0
        self.scale = abs(self.scale or self.constant_loss or mean)
        if mean > before + LEAP * self.scale:
            self.lowest = mean  # so that a leap is reported once
            leap = (
                f"the loss leapt from {before:.3g} to {mean:.3g} by step {step} of epoch {epoch + 1}: {self.remedies}"
            )
            return self.record(epoch, step, [leap])
        self.lowest = min(mean, before)
        return []

    def after_evaluation(self, finished: EpochFinished, step: int, guessing_loss: float = 0.0) -> list[NotLearning]:
        """Record whether an evaluation's loss is no better than guessing, and return a warning if it newly is.

        The loss of guessing is constant_loss, that of one prediction for all samples. An evaluation's loss is no better
        if it is higher, or lower by at most 1 - GUESSING of the guessing loss's absolute value. Nothing is recorded in
        the first epochs, which may be that bad.

        Args:
            finished: the evaluation, with a loss.
            step: the number of the epoch's steps so far.
            guessing_loss: the mean loss of outputs paired with other samples, which replaces constant_loss if that is
                unknown (0). If both are 0, nothing counts as guessing.

        Returns:
            The warning in a list; an empty list if the loss is better, or if the last evaluation's was no better, too.
        """
        if finished.position < min(EARLY * self.epochs, MOST_EARLY):
            return []
        loss = finished.evaluated["loss"]
        bound = self.constant_loss or guessing_loss
        was_guessing = self.guessing
        self.guessing = bound != 0 and loss >= bound - (1 - GUESSING) * abs(bound)
        if was_guessing or not self.guessing:
            return []
        reason = (
            f"no better than guessing after epoch {counted(finished.position)}: the loss is {loss:.4g}, and "
            f"{bound:.4g} for predictions that are the same for all samples: {self.remedies}"
        )
        return self.record(finished.epoch, step, [reason])

    def warn_of_not_finite(self, names: Iterable[str], split: str, position: float, step: int) -> list[NotLearning]:
        """Record and return a warning of each measure that is not finite on a split, once for each measure and split.

        Args:
            names: the measures that are NaN or infinite on the split, without the loss.
            split: the name of the split.
            position: the number of epochs that have been trained, with fractions.
            step: the number of the epoch's steps so far.

        Returns:
            The new warnings, which the caller emits.
        """
        new = [name for name in names if f"{split} {name}" not in self.broken]
        self.broken += [f"{split} {name}" for name in new]
        reason = (
            "{} on the {} split is not finite after epoch {}, although the loss is: look for samples whose value "
            "divides by 0, or leave these out"
        )
        reasons = [reason.format(name, split, counted(position)) for name in new]
        return self.record(_epoch(position), step, reasons)

    def warn_of_no_weights(self, split: str, position: float, step: int) -> list[NotLearning]:
        """Record and return a warning, once for each split, that none of the split's samples counts for the loss.

        The arguments are those of warn_of_not_finite(). The list is empty if the split has had this warning.
        """
        if f"{split} loss" in self.broken:
            return []
        self.broken.append(f"{split} loss")
        reason = (
            f"no sample of the {split} split counts for the loss after epoch {counted(position)}: the weights that "
            "measure() gives it add up to 0, as where all labels are ignored"
        )
        return self.record(_epoch(position), step, [reason])

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        warnings = [SlowRank(**one) if "rank" in one else NotLearning(**one) for one in saved["warnings"]]
        new = [warning for warning in self.warnings if warning not in warnings]  # warnings since this start
        vars(self).update(saved, epochs=self.epochs, warnings=[*warnings, *new])


def _epoch(position: float) -> int:
    """Return the epoch, from 0, in which so many epochs, with fractions, had been trained."""
    return math.ceil(position) - 1
