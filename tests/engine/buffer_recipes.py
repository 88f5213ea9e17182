"""Recipes whose networks have buffers, or other state: as they may, and as no checkpoint could keep."""

import torch
from torch import nn

from tests.engine.probe_recipes import WIDTH, Sound


class SpectralNorm(Sound):
    """Its buffers change, but follow no samples."""

    def model(self):
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


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


class Evaluations(nn.Module):
    """Counts its calls in evaluation."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features):
        if not self.training:
            self.calls += 1
        return features * (1 + self.calls / 100)


class CountsEvaluations(Sound):
    body = Evaluations


class CountedByNumber(nn.Module):
    calls = 0

    def forward(self, features):
        self.calls += 1
        return features * (1 + 1 / self.calls)


class LostNumber(Sound):
    body = CountedByNumber


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


class Widening(nn.Module):
    """Turns its buffer, whose value stays the same, into one of another type."""

    total: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, features):
        self.total = self.total.double()
        return features + self.total.float()


class WidenedBuffer(Sound):
    body = Widening


class LateBuffer(Sound):
    body = Mask


class Scale(nn.Module):
    """Makes its layer at the first call in training, or in evaluation."""

    def __init__(self, is_training):
        super().__init__()
        self.is_training = is_training

    def forward(self, features):
        if self.training == self.is_training and not hasattr(self, "layer"):
            self.layer = nn.Linear(WIDTH, WIDTH)
        return self.layer(features) if hasattr(self, "layer") else features


class LateWeight(Sound):
    def body(self):
        return Scale(is_training=True)


class LateWeightInEvaluation(Sound):
    def body(self):
        return Scale(is_training=False)


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


class ScaledTable(Sound):
    """Scales the rows that a batch looks up, in the table itself, which is trained."""

    def data(self, split):
        return torch.arange(12)

    def model(self):
        return nn.Embedding(12, WIDTH, max_norm=1.0)

    def measure(self, outputs, batch):
        return {"loss": outputs.square().mean(1)}
