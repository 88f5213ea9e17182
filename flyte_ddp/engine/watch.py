"""Notices a training that does not learn, by its losses alone. Standard library only."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List

from flyte_ddp.events import NotLearning

GUESSING = 0.99  # of a constant prediction's loss, from which on a model counts as no better than that
LEAP = 0.3  # of the same, by which the loss has to rise above its lowest to have leapt
WINDOW = 1000  # samples at least that a loss is the mean of: a few hard ones among fewer look like a leap


@dataclass
class Watch:
    """What to know of a training to tell whether it learns; the same on all ranks, since they share the losses.

    Attributes:
        constant_loss: mean loss of the best prediction that is the same for all samples: of classes the entropy of
            their frequencies. 0 where it is not known.
        scale: what a leap is measured by: constant_loss, or where it is not known the mean loss of the first window.
        lowest: the lowest mean training loss of any window since the last leap.
        loss_sum, samples: of the window under way.
        guessing: whether the last epoch ended no better than the constant prediction.
        warnings: all that were given.
        remedies: how they end.
    """

    constant_loss: float = 0.0
    scale: float = 0.0
    lowest: float = math.inf
    loss_sum: float = 0.0
    samples: int = 0
    guessing: bool = False
    warnings: List[NotLearning] = field(default_factory=list)
    remedies: str = "lower learning_rate, shorten gradients by clip_norm, or raise warmup_fraction"

    def after_steps(self, epoch: int, step: int, loss: float, samples: int) -> List[NotLearning]:
        """Notes the mean loss of the latest samples; returns a warning if the loss has leapt."""
        self.loss_sum, self.samples = self.loss_sum + loss * samples, self.samples + samples
        if self.samples < WINDOW:
            return []
        mean, before = self.loss_sum / self.samples, self.lowest
        self.loss_sum, self.samples = 0.0, 0
        self.scale = self.scale or self.constant_loss or abs(mean)
        if mean > before + LEAP * self.scale:
            self.lowest = mean  # so that a leap is reported once
            return self._warn(
                epoch,
                step,
                f"the loss leapt from {before:.3g} to {mean:.3g} by step {step} of epoch {epoch + 1}: {self.remedies}",
            )
        self.lowest = min(mean, before)
        return []

    def after_epoch(self, epoch: int, step: int, loss: float, mismatched: float = 0.0) -> List[NotLearning]:
        """Takes in the mean loss of the test or validation split; a warning where it became no better than guessing.

        mismatched: of the outputs for other samples, which stands in for constant_loss where that is not known.
        """
        bound = self.constant_loss or mismatched
        was_guessing, self.guessing = self.guessing, bound != 0 and loss >= bound - (1 - GUESSING) * abs(bound)
        if was_guessing or not self.guessing:
            return []
        return self._warn(
            epoch,
            step,
            f"no better than guessing after epoch {epoch + 1}: the loss is {loss:.4g}, and "
            f"{bound:.4g} for predictions that are the same for all samples: {self.remedies}",
        )

    def _warn(self, epoch: int, step: int, reason: str) -> List[NotLearning]:
        self.warnings.append(NotLearning(epoch, step, reason))
        return self.warnings[-1:]

    def state_dict(self) -> Dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, saved: Dict[str, Any]) -> None:
        vars(self).update(saved, warnings=[NotLearning(**one) for one in saved["warnings"]])
