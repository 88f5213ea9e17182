"""Recipes that are trained with virtual ranks, sharded and not, and some that cannot be."""

import torch
from torch import nn

from tests.engine import sharding_recipes
from tests.engine.memory_recipes import Block
from tests.engine.probe_recipes import WIDTH, Sound
from tests.engine.sharding_recipes import Choosing, Digits, Sharded


class Unfused:
    """A fused optimizer would round some numbers on a CPU otherwise where tensors are cut."""

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 0.003, weight_decay=0.1)


class Clipped(Unfused, Digits):
    """A vision transformer whose rows, 18 and 36 wide, are no multiples of three or four ranks; with an average."""

    ema_decay, activation_checkpointing = 0.9, ("encoder.layers.*_0",)


class Long(nn.Module):
    """A body that is used in itself twice, and around itself, with biases of more than one block of numbers."""

    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 150), nn.Linear(150, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.factor = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, first, second):
        return self.back(self.wide(self.norm(first)).tanh()) * first * self.factor[:, 0] + (first is second) * second


class Around(nn.Module):
    """Skips its units, and uses some of its experts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.long, self.block, self.experts = Long(), Block(), Choosing()
        self.lonely = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        hidden = self.first(features)
        early = hidden.sin()
        long = self.long(hidden, hidden)
        later = long * hidden + early * long.cos()
        if features.sum() > 4:  # in few parts
            later = later + self.lonely(later)
        return self.last(self.experts(self.block(later)) + hidden)


class Skipping(Sound):
    fsdp_units: tuple[str, ...] = ("long", "block", "experts")
    clip_norm = 0.3

    def model(self):
        return Around()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)


class Frozen(Skipping):
    """Whose body is frozen, although what comes before it is trained."""

    ema_decay = 0.9

    def model(self):
        model = super().model()
        model.long.requires_grad_(False)
        return model


class Encoded(Unfused, Sound):
    """Of layers that torch evaluates by other kernels, unless something hooks them, as sharding does."""

    fsdp_units: tuple[str, ...] = ("1.layers.*",)

    def model(self):
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), encoder, nn.Flatten(), nn.Linear(WIDTH, WIDTH))


class Spiking(Skipping):
    """Of which a few samples have gradients 2^30 times as large, and others 2^30 times as small, or 0."""

    clip_norm = 0.0

    def measure(self, outputs, batch):
        loss = super().measure(outputs, batch)["loss"]
        kinds = (batch[:, 0].abs() * 1000).long() % 6
        return {"loss": loss, "objective": loss * torch.tensor([2.0**30, 0.0, 2.0**-30, 1.0, 1.0, 1.0])[kinds]}


class Breaking(Unfused, sharding_recipes.Breaking):
    pass


class BreakingGradient(Unfused, sharding_recipes.BreakingGradient):
    pass


# --- what is refused ---


class Fused(Sharded):
    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), fused=True)


class InParts(Sharded):
    micro_batch = 1


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        return self.inner(self.inner(features).tanh())


class Twice(Unfused, Sound):
    """Calls a unit twice."""

    fsdp_units, body = ("1.inner",), Doubled


class Transposed(Sharded):
    def model(self):
        network = super().model()
        network.head.weight.data = torch.randn(WIDTH, WIDTH).t()
        return network


class Unaligned(Sharded):
    def model(self):
        network = super().model()
        network.head.weight.data = torch.randn(WIDTH * WIDTH + 1)[1:].view(WIDTH, WIDTH)
        return network
