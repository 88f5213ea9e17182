"""Recipes whose measures or gradients are wrong."""

import os

import torch
from torch import nn
from torch.nn import functional as F

from tests.engine.probe_recipes import WIDTH, Sound


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


class DerivedTensor(Sound):
    def derive(self, measures):
        return {**measures, "both": torch.zeros(2)}


class NoLoss(Sound):
    def measure(self, outputs, batch):
        return {"error": (outputs - batch).square().mean(1)}


class Headline(Sound):
    headline = "acuracy"


class AugmentDrops(Sound):
    def augment(self, batch, random):
        return batch[1:]


class OneRankRaises(Sound):
    def measure(self, outputs, batch):
        if os.environ.get("RANK", "0") == "1" or self.share.first:
            raise ZeroDivisionError("only where the share begins later")
        return super().measure(outputs, batch)
