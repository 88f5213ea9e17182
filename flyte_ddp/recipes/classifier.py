"""Classification of any samples: subclasses only add data and model."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flyte_ddp.recipe import Measures, Recipe


class Classifier(Recipe):
    """Batches (inputs (n, ...), labels (n,) int64), and a network that returns logits (n, classes).

    Attributes:
        label_smoothing: share of the target that is spread evenly over all classes.
    """

    headline = "accuracy"
    label_smoothing = 0.0

    def measure(self, outputs: Tensor, batch: Any) -> Measures:
        labels, logarithms = batch[1], F.log_softmax(outputs.float(), dim=1)
        # without smoothing, so that it can be compared with the loss on the test split
        loss = F.nll_loss(logarithms, labels, reduction="none")
        measures: dict[str, Any] = {"loss": loss, "accuracy": outputs.argmax(1) == labels}
        if self.label_smoothing:
            measures["objective"] = torch.lerp(loss, -logarithms.mean(1), self.label_smoothing)
        return measures

    def predictions(self, outputs: Tensor, batch: Any) -> Tensor:
        """(n, classes) log-probabilities."""
        return F.log_softmax(outputs.float(), dim=1)
