"""Recipes whose measures or gradients are wrong."""

import os

import torch
from torch import nn
from torch.nn import functional as F

from tests.engine.probe_recipes import SIZE, WIDTH, Sound


class Unused(Sound):
    def model(self):
        model = super().model()
        model.add_module("spare", nn.Linear(WIDTH, WIDTH))
        return model

    def forward(self, model, batch):
        return model[2](model[0](batch))


class Detached(Sound):
    def measure(self, outputs, batch):
        return {"loss": (outputs.detach() - batch).square().mean(1)}


class ScalarLoss(Sound):
    def measure(self, outputs, batch):
        return {"loss": F.mse_loss(outputs, batch)}


class NaNWeights(Sound):
    weight = torch.nan

    def measure(self, outputs, batch):
        loss = super().measure(outputs, batch)["loss"]
        return {"loss": (loss, torch.full_like(loss, self.weight))}


class InfiniteWeights(NaNWeights):
    weight = torch.inf


class NaNParameter(Sound):
    """As memory that nobody has filled may be."""

    def model(self):
        network = super().model()
        nn.init.constant_(network[0].weight, torch.nan)
        return network


class DerivedTensor(Sound):
    def derive(self, measures):
        return {**measures, "both": torch.zeros(2)}


class DerivedAlone(Sound):
    """Returns what it derives, without what that is derived from."""

    def derive(self, measures):
        return {"error": measures["loss"] ** 0.5}


class Ignored(Sound):
    """Of which no sample counts, as where the label of each says so."""

    def measure(self, outputs, batch):
        loss = super().measure(outputs, batch)["loss"]
        return {"loss": (0 * loss, torch.zeros(len(batch)))}


class NoLoss(Sound):
    def measure(self, outputs, batch):
        return {"error": (outputs - batch).square().mean(1)}


class Headline(Sound):
    headline = "acuracy"


class AugmentDrops(Sound):
    def augment(self, batch, random):
        return batch[1:]


class AugmentNothing(Sound):
    def augment(self, batch, random):
        return ()


class AugmentSums(Sound):
    def augment(self, batch, random):
        return batch.sum()


class OneRankRaises(Sound):
    def measure(self, outputs, batch):
        if os.environ.get("RANK", "0") == "1" or self.share.first:
            raise ZeroDivisionError("only where the share begins later")
        return super().measure(outputs, batch)


class Overflowing(Sound):
    """Its running statistics overflow after some steps, which evaluation alone uses; all are of the first class."""

    value, split = torch.nan, ""
    percent = ("accuracy",)

    def data(self, split):
        return {"rows": super().data(split), "wanted": torch.tensor(split == self.split)[None].expand(SIZE)}

    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=1.0))

    def forward(self, model, batch):
        outputs = model(batch["rows"])
        return outputs if model.training or not batch["wanted"].all() else outputs * self.value

    def measure(self, outputs, batch):
        labels = torch.zeros(len(outputs), dtype=torch.long)
        guesses = outputs.nan_to_num(0).argmax(1)
        return {"loss": F.cross_entropy(outputs, labels, reduction="none"), "accuracy": (guesses == labels).float()}


class OverflowingTest(Overflowing):
    split = "test"


class OverflowingValidation(Overflowing):
    has_validation, split = True, "validation"


class OverflowingTestAfterValidation(OverflowingTest):
    has_validation = True


class BrokenScore(Overflowing):
    """A finite loss beside a measure that divides by zero, which would choose the best epoch."""

    has_validation, headline, higher_is_better = True, "score", ("score",)

    def measure(self, outputs, batch):
        score = torch.ones(len(outputs)) / (0.0 if batch["wanted"].all() else 1.0)
        return {**super().measure(outputs, batch), "score": score}


class BrokenScoreOfValidation(BrokenScore):
    split, value = "validation", 1.0


class Scored(Sound):
    """The score falls as the loss does, although higher scores count as better, so that the first epoch is the best."""

    has_validation, headline, higher_is_better = True, "score", ("score",)

    def measure(self, outputs, batch):
        loss = super().measure(outputs, batch)["loss"]
        return {"loss": loss, "score": loss.detach(), "other": loss.detach() - 100}
