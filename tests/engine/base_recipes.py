"""Recipes whose networks have a part that model() itself freezes."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.engine.probe_recipes import WIDTH, Sound

SHIFT = 0.0  # of the base's weights: those of another base


class Based(Sound):
    """Its base is drawn at random, and has a buffer that changes."""

    def model(self):
        first = nn.Linear(WIDTH, 3 * WIDTH)
        base = nn.Sequential(first, nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH)).requires_grad_(False)
        first.weight.add_(SHIFT)
        return nn.Sequential(base, nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))


class Permutation(nn.Module):
    """Has an order and a factor that it draws, and that no state dict has."""

    def __init__(self):
        super().__init__()
        self.order = np.random.permutation(WIDTH)
        self.factor = random.random()

    def forward(self, features):
        return self.factor * features[:, self.order]


class Permuted(Sound):
    """Draws before and in model() by other generators than torch's."""

    body = Permutation

    def data(self, split):
        np.random.random()
        random.random()
        return super().data(split)


class Averaged(Based):
    ema_decay, has_validation = 0.5, True

    def data(self, split):
        return super().data(split)[:5] if split == "validation" else super().data(split)


class Tied(Sound):
    """Two of its frozen layers share their weights, and one of those is not trained."""

    def model(self):
        shared = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        return nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), copy.copy(shared))


class Follower(nn.Module):
    """A student, and a teacher that follows its weights."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.student.bias)  # as those of normalising layers begin
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, features):
        if self.training:
            with torch.no_grad():
                for follower, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    follower.lerp_(weight, 0.1)
        return self.student(features) - 0.5 * self.teacher(features)


class Taught(Sound):
    """A frozen base, which is as model() has it, and a teacher, which is not."""

    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), Follower())


class TaughtFast(Taught):
    """The trial's step is one without the schedule and clipping of training: what follows it may be anything."""

    def optimizer(self, model):
        return torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 3e38, weight_decay=99)

    def lr_lambda(self, step, steps):
        return 1e-41

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        torch.distributions.Normal(outputs, 1.0)  # refuses a NaN
        return outputs


class LateFollower(Follower):
    """Begins to follow when it has been called some times."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features):
        if self.training:
            self.calls += 1
        if self.calls > 1:
            return super().forward(features)
        return self.student(features)


class TaughtLate(Taught):
    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), LateFollower())


class LateCopy(LateFollower):
    """Takes the student's weights then, by .data, of whose changes torch keeps no count."""

    def forward(self, features):
        if self.training:
            self.calls += 1
            if self.calls > 1:
                self.teacher.weight.data.copy_(self.student.weight)
        return self.student(features)


class CopiedLate(Taught):
    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), LateCopy())


class Typed(Sound):
    """The weights of its layers have the types that are set here."""

    first: Any = torch.float32
    last: Any = torch.float32

    def model(self):
        class Cast(nn.Linear):
            def forward(self, features):
                return super().forward(features.to(self.weight.dtype)).float()

        first = Cast(WIDTH, WIDTH).to(self.first).requires_grad_(False)
        return nn.Sequential(first, Cast(WIDTH, WIDTH).to(self.last))


class TrainedBfloat16(Typed):
    last = torch.bfloat16


class TrainedFloat64(Typed):
    last = torch.float64


class FrozenBfloat16(Typed):
    first = torch.bfloat16


class FrozenFloat16(Typed):
    first = torch.float16


class Lora(Sound):
    """A base in bfloat16, and adapters of rank 1."""

    def model(self):
        from peft import LoraConfig, get_peft_model  # it takes seconds, which ranks of other recipes would spend, too

        width = 512
        base = nn.Sequential(
            nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, WIDTH)
        )
        return get_peft_model(base, LoraConfig(r=1, target_modules=["2"]))
