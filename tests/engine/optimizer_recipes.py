"""Recipes whose optimizers keep something that a checkpoint lacks, or do not have all weights."""

import os
from collections import deque
from typing import Any

import torch

from tests.engine.probe_recipes import Sound


class Slow(torch.optim.SGD):
    """Returns to where it has been every second step, which a checkpoint lacks."""

    def __init__(self, params):
        super().__init__(params, 0.1)
        self.steps, self.before = 0, [weight.detach().clone() for weight in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.steps += 1
        if self.steps % 2 == 0:
            for weight, before in zip(self.param_groups[0]["params"], self.before, strict=True):
                weight.copy_(before.lerp_(weight, 0.5))


class Whole(Slow):
    def state_dict(self):
        return {**super().state_dict(), "slow": (self.steps, self.before)}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.steps, self.before = state_dict["slow"][0], [one.clone() for one in state_dict["slow"][1]]


class Slowing(torch.optim.SGD):
    """Counts its steps in its group, as optimizers without a learning rate do, and makes them smaller by that."""

    def __init__(self, params):
        super().__init__(params, 0.1)
        self.param_groups[0]["steps"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["steps"] += 1
        for weight in group["params"]:
            weight -= group["lr"] / group["steps"] * weight.grad


class Outer(torch.optim.Optimizer):
    """Holds another optimizer, as those do that look ahead."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


class Unloaded(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["fast"])


class Counted(torch.optim.SGD):
    """Counts, without any effect, and halves the gradients in its step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for weight in self.param_groups[0]["params"]:
            weight.grad.mul_(0.5)
        super().step()


class Secant(torch.optim.SGD):
    """Keeps the last gradient, to follow the difference."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            weight -= 0.1 * (weight.grad + (weight.grad - self.state[weight].get("last", weight.grad)))
            self.state[weight]["last"] = weight.grad


class Shared(torch.optim.SGD):
    """Keeps a tensor that belongs to no single weight."""

    def step(self, closure=None):
        state: Any = self.state
        rates = state["shared"].setdefault("rates", torch.full((2,), 0.1))
        self.param_groups[0]["lr"] = rates.mul_(0.9)[0].item()
        super().step()


class Recorder(torch.optim.SGD):
    """Keeps the last norms of each gradient, in a type that no checkpoint can have."""

    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            self.state[weight].setdefault("norms", deque(maxlen=3)).append(float(weight.grad.norm()))
        super().step()


class Forgetful(Sound):
    kind: Any = Slow

    def optimizer(self, model):
        return self.kind(model.parameters())


class KeepsAGradient(Forgetful):
    kind = Secant


class Recording(Forgetful):
    kind = Recorder


class SharingABuffer(Forgetful):
    kind = Shared


class Remembering(Forgetful):
    kind = Whole


class CountingInItsGroup(Forgetful):
    kind = Slowing


class FusedWhereItMay(Sound):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), fused="FUSED" in os.environ)


class Holding(Sound):
    def optimizer(self, model):
        return Outer(torch.optim.SGD(model.parameters(), 0.1, 0.9))


class Unloadable(Sound):
    def optimizer(self, model):
        return Unloaded(model.parameters(), 0.1)


class Counting(Sound):
    def optimizer(self, model):
        return Counted(model.parameters(), 0.1)


class Scheduled(Sound):
    """Its warm-up begins with 0."""

    def optimizer(self, model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
        return optimizer


class HalfGiven(Sound):
    def optimizer(self, model):
        return torch.optim.SGD(model[2].parameters(), 0.1)
