"""The recipe for classifying any samples. Subclasses only add data and model."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Measures, Recipe

NO_LABEL = -(2**31)  # torch's losses leave out -100 by default, which would count as a sample without loss here


class Classifier(Recipe):
    """A recipe for batches (inputs (n, ...), labels (n,) int64) and a network that returns logits (n, classes).

    Attributes:
        label_smoothing: share of the target that is spread evenly over all classes.
    """

    headline = "accuracy"
    label_smoothing = 0.0

    def measure(self, outputs: Tensor, batch: Any) -> Measures:
        labels = batch[1]
        self._check(outputs, labels)
        logarithms = F.log_softmax(outputs.float(), dim=1)
        # The loss has no smoothing, so that it can be compared with the loss on the test split
        try:
            loss = F.nll_loss(logarithms, labels, reduction="none", ignore_index=NO_LABEL)
        except IndexError:  # a GPU does not raise it, so the trial checks the range
            self._check_range(outputs, labels)
            raise
        measures: dict[str, Any] = {"loss": loss, "accuracy": outputs.argmax(1) == labels}
        if self.label_smoothing:
            measures["objective"] = torch.lerp(loss, -logarithms.mean(1), self.label_smoothing)
        return measures

    def _check(self, outputs: Any, labels: Any) -> None:
        """Raise InputError for outputs that are no tensor (n, classes), or labels that are not (n,) int64 or uint8.

        Without other ranks (self.share.alone), also raise InputError for a label below 0 or above the last class.
        """
        owner = type(self).__name__
        count = len(labels)
        self._check_logits(outputs)
        if labels.dtype not in (torch.int64, torch.uint8) or labels.ndim != 1:
            dtype = str(labels.dtype).removeprefix("torch.")
            raise InputError(
                f"{owner}: labels must be int64 of shape ({count},), got {dtype} of shape {tuple(labels.shape)}: "
                "return the number of each sample's class, as .long() gives it, or .argmax(1) of several columns, or "
                "[:, 0] of one"
            )
        if self.share.alone:  # not in each step: this check makes the host wait for a GPU
            self._check_range(outputs, labels)

    def _check_logits(self, outputs: Any) -> None:
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            got = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise InputError(
                f"{type(self).__name__}: forward must return logits, a tensor of shape (n, classes), got "
                f"{got}: for other outputs, define measure() and predictions()"
            )

    def _check_range(self, outputs: Tensor, labels: Tensor) -> None:
        classes = outputs.shape[1]
        wrong = labels[(labels >= classes) | (labels < 0)]
        if len(wrong):
            remedy = ": leave samples without a label out of the data" if wrong[0] < 0 else ""
            raise InputError(
                f"{type(self).__name__}: labels must be from 0 to {classes - 1}, since the network returns {classes} "
                f"logits, got {int(wrong[0])}{remedy}"
            )

    def predictions(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return log-probabilities, (n, classes)."""
        self._check_logits(outputs)
        return F.log_softmax(outputs.float(), dim=1)
