"""Recipes whose samples depend on one another: on those of their rank, or by all_gather() on all of the batch."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.engine.dataset_recipes import Rows
from tests.engine.probe_recipes import WIDTH, Sound, body, table
from tests.engine.random_recipes import LSTM


class MeanOfBatch(Sound):
    body = body(lambda features: features - features.mean(0))


class Mixup(Sound):
    def augment(self, batch, random):
        return batch + batch.roll(1, 0)


class Ranked(Sound):
    def measure(self, outputs, batch):
        loss = (outputs - batch).square().mean(1)
        return {"loss": loss, "worst": loss == loss.max()}


class Contrastive(Sound):
    def measure(self, outputs, batch):
        return {"loss": F.cross_entropy(outputs @ batch.T, torch.arange(len(batch)), reduction="none")}


class RunningMean(nn.Module):
    """gather: may be the recipe's all_gather(), of which trials and the average must not make a copy."""

    mean: torch.Tensor

    def __init__(self, gather=lambda rows: rows):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.gather = gather

    def forward(self, features):
        if self.training:
            self.mean.lerp_(self.gather(features.detach()).mean(0), 0.1)
        return features - self.mean


class MeanOfRank(Sound):
    body = RunningMean


class BatchNormInParts(Sound):
    micro_batch, body = 2, staticmethod(lambda: nn.BatchNorm1d(WIDTH))


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        return features.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm().clamp(min=1e-6)


class NormalisedBackward(Sound):
    body = body(_Normalised.apply)


class ClampedByHook(Sound):
    def model(self):
        model = super().model()
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model


class ClampedAfterwards(Sound):
    def model(self):
        model = super().model()
        model[0].weight.register_post_accumulate_grad_hook(clamp_gradient)
        return model


def clamp_gradient(weight):
    weight.grad.clamp_(-0.01, 0.01)


class CentredInEvaluation(Sound):
    def forward(self, model, batch):
        outputs = model(batch)
        return outputs if model.training else outputs - outputs.mean(0)


class CentredPredictions(LSTM):
    """An LSTM calls what may draw in evaluation, too, but does not draw there."""

    def predictions(self, outputs, batch):
        return outputs - outputs.mean(0)


# --- samples that are read together ---


class MixingReader(Rows):
    def read_batch(self, indices):
        rows = table()[indices]
        return rows + rows[::-1]


class MixedByReader(Sound):
    def data(self, split):
        return MixingReader()


class PaddingReader(Rows):
    def read_batch(self, indices):
        lengths = 1 + indices % WIDTH
        return table()[indices][:, : lengths.max()], lengths


class Padded(Sound):
    """Its rows are as long as the longest of the samples that are read together."""

    def data(self, split):
        return PaddingReader()

    def model(self):
        return nn.Sequential(nn.Linear(1, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))

    def forward(self, model, batch):
        return model(batch[0][:, :, None])[:, :, 0]

    def measure(self, outputs, batch):
        rows, lengths = batch
        is_there = torch.arange(rows.shape[1]) < lengths[:, None]
        return {"loss": ((outputs - rows).square() * is_there).sum(1)}


# --- all_gather() ---


class Everyone(Sound):
    def measure(self, outputs, batch):
        places = self.share.first + torch.arange(len(batch))
        return {"loss": F.cross_entropy(outputs @ self.all_gather(batch).T, places, reduction="none")}


class EveryoneInParts(Everyone):
    micro_batch = 2


class EveryoneInTest(Everyone):
    is_training = True

    def forward(self, model, batch):
        self.is_training = model.training
        return super().forward(model, batch)

    def measure(self, outputs, batch):
        return Sound.measure(self, outputs, batch) if self.is_training else super().measure(outputs, batch)


class EveryoneInEvaluation(Sound):
    """Ranks each sample among all of the batch, once it is trained."""

    def predictions(self, outputs, batch):
        return (outputs.sum(1) < self.all_gather(outputs.sum(1))[:, None]).sum(0)


class EveryonesBuffer(Sound):
    ema_decay = 0.5

    def body(self):
        return RunningMean(self.all_gather)
