"""Recipes whose samples depend on one another: by their batch, by all_gather() or by a norm's groups."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.engine.probe_recipes import WIDTH, Sound, body


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


class UndeclaredEveryone(Sound):
    def measure(self, outputs, batch):
        places = self.share.first + torch.arange(len(batch))
        return {"loss": F.cross_entropy(outputs @ self.all_gather(batch).T, places, reduction="none")}


class Everyone(UndeclaredEveryone):
    uses_global_batch = True


class EveryoneFromZero(Sound):
    """Forgets where in the global batch the rank's samples are: right on one rank alone."""

    uses_global_batch = True

    def measure(self, outputs, batch):
        scores = outputs @ self.all_gather(batch).T
        return {"loss": F.cross_entropy(scores, torch.arange(len(batch)), reduction="none")}


class RunningMean(nn.Module):
    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, features):
        self.mean.lerp_(features.detach().mean(0), 0.1)
        return features


class Deep(Sound):
    """Whose activations would be infinite, were it not for batch norm."""

    last: Any = nn.Identity

    def model(self):
        layers = [
            (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), body(lambda features: 30 * features)()) for _ in range(40)
        ]
        return nn.Sequential(*(layer for some in layers for layer in some), nn.BatchNorm1d(WIDTH), self.last())


class DeepMean(Deep):
    last = body(lambda features: features - features.mean(0))


class Buffer(Sound):
    body = RunningMean


class MeanOfAll(RunningMean):
    """Is given the recipe's all_gather(), of which trials and the average must not make a copy."""

    def __init__(self, everyone):
        super().__init__()
        self.all_gather = everyone

    def forward(self, features):
        if self.training:
            self.mean.lerp_(self.all_gather(features.detach()).mean(0), 0.1)
        return features - self.mean


class EveryonesBuffer(Sound):
    uses_global_batch, ema_decay = True, 0.5

    def body(self):
        return MeanOfAll(self.all_gather)


class SpectralNorm(Sound):
    """Its buffers change, but follow no samples."""

    def model(self):
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Permitted(MeanOfBatch):
    may_depend_on_ranks = True


class MicroBatchNorm(Sound):
    micro_batch, body = 2, staticmethod(lambda: nn.BatchNorm1d(WIDTH))


class MicroEveryone(Everyone):
    micro_batch = 2


class GroupedNorm(Sound):
    """Three rows for each sample, one after another."""

    ghost_batch_size, micro_batch = 2, 4

    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, eps=0.01), nn.Linear(WIDTH, WIDTH))

    def forward(self, model, batch):
        return model(batch.repeat_interleave(3, 0)).unflatten(0, (-1, 3)).mean(1)


class GroupedNormOfSteps(GroupedNorm):
    """Three rows for each sample, the first ones of all samples coming first."""

    def forward(self, model, batch):
        return model(batch.repeat(3, 1)).unflatten(0, (3, -1)).mean(0)


class GroupedNormOfSome(GroupedNorm):
    """Not as many rows for each sample."""

    def forward(self, model, batch):
        return torch.cat([model(batch[:-1]), batch[-1:]])


class Counted(nn.Module):
    """Counts its calls, where no state_dict has it."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, features):
        self.calls += 1
        return features * (1 + 1 / self.calls)


class LostBuffer(Sound):
    body = Counted


class Mask(nn.Module):
    """Makes its mask at the first call."""

    mask: torch.Tensor | None

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("mask", None, persistent)

    def forward(self, features):
        if self.mask is None:
            self.mask = torch.ones(features.shape[1])
        return features * self.mask


class LateBuffer(Sound):
    body = Mask


class LateCache(Sound):
    """In front of other buffers, so that it has the place of one of them."""

    ema_decay = 0.9

    def body(self):
        return nn.Sequential(Mask(persistent=False), nn.BatchNorm1d(WIDTH))


class Noted(nn.Identity):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass


class ExtraState(Sound):
    body = Noted
