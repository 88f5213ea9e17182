"""Recipes whose networks are sharded, and some that cannot be."""

import functools
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer

from flyte_ddp.recipe import Recipe
from tests.engine.base_recipes import Follower
from tests.engine.memory_recipes import Kept
from tests.engine.probe_recipes import WIDTH, Sound


class Digits(Recipe):
    """A small vision transformer."""

    headline, clip_norm = "accuracy", 0.5
    fsdp_units: tuple[str, ...] = ("encoder.layers.*",)
    dropout = 0.1

    def data(self, split):
        digits = load_digits()
        chosen = slice(0, 159) if split == "train" else slice(159, 209)
        images = torch.from_numpy(digits.images[chosen]).float().div(16)
        return images[:, None].expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(digits.target[chosen])

    def model(self):
        network = VisionTransformer(8, 2, 2, 2, 18, 36, dropout=self.dropout, num_classes=10)
        nn.init.normal_(network.heads[0].weight, std=0.1)
        return network

    def measure(self, outputs, batch):
        loss = F.cross_entropy(outputs.float(), batch[1], reduction="none")
        return {"loss": loss, "accuracy": (outputs.argmax(1) == batch[1]).float()}

    def predictions(self, outputs, batch):
        return outputs.argmax(1)

    def pictures(self, outputs, batch):
        return [(str(int(row.argmax())), image) for row, image in zip(outputs, batch[0], strict=True)]


class Everything(Digits):
    """All that a recipe can ask for at once; 3 ranks have shares of 6, 5 and 5 samples, in 2, 2 and 2 parts."""

    ema_decay, micro_batch, activation_checkpointing = 0.9, 5, ("encoder.layers.*",)

    def optimizer(self, model):
        weights = list(model.parameters())
        groups = [{"params": [w for w in weights if w.ndim > 1]}, {"params": [w for w in weights if w.ndim == 1]}]
        return torch.optim.SGD(groups, 0.1, momentum=0.9, fused=True)


class Undrawn(Everything):
    """Draws nothing, so that its result is the same on any number of ranks, up to rounding."""

    dropout = 0.0


class ChannelsLast(Digits):
    """A convolution whose weights lie otherwise in memory where they are whole, as fused optimizers rely on."""

    fsdp_units = ("3",)

    def model(self):
        layers = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(96, 12), nn.Linear(12, 10)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, fused=True)


class Normed(Digits):
    """Batch norm, whose running statistics are buffers; the first layer is a unit with a gradient for none of its
    inputs."""

    fsdp_units = ("0", "3")

    def model(self):
        body = nn.Linear(12, 12)
        return nn.Sequential(
            # A bias before batch norm would have rounding errors alone as its gradient, which Adam makes steps of
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.Flatten(),
            nn.Linear(216, 12),
            body,
            nn.Linear(12, 10),
        )


class Tied(Sound):
    fsdp_units: tuple[str, ...] = ("1", "2")

    def model(self):
        network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        network[2].weight = network[0].weight
        return network


class TiedOutside(Tied):
    fsdp_units = ("1",)


class Sharded(Kept):
    fsdp_units = ("blocks.*",)


class Plain(Sharded):
    """Without an average, which would be evaluated."""

    ema_decay = 0.0


class Choosing(nn.Module):
    """Each sample is for one of two experts, and an expert without samples isn't called."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, features):
        first, found = features[:, 0] > 0, torch.zeros_like(features)
        for expert, mine in zip(self.experts, (first, ~first), strict=True):
            if mine.any():
                found[mine] = expert(features[mine])
        return features + found


class Experts(Sound):
    """Of batches of 3, which ranks share, no rank uses all experts."""

    fsdp_units, body = ("1",), Choosing


class ExpertsAlone(Experts):
    """A unit that a rank doesn't call while the other does."""

    fsdp_units = ("1.experts.*",)


class ByDirection(nn.Linear):
    """Computes with its weights before torch does."""

    def forward(self, features):
        return F.linear(features, 3 * F.normalize(self.weight, dim=1), self.bias)


class Standardised(nn.Conv1d):
    def _conv_forward(self, features, weight, bias):
        return super()._conv_forward(features, weight / weight.norm(), bias)


class OwnLayers(Sound):
    """Layers derived from torch's own, or with a hook, whose weights are used as they are, too."""

    fsdp_units = ("*",)

    def model(self):
        body = nn.Unflatten(1, (1, WIDTH)), Standardised(1, 1, 3, padding=1), nn.Flatten()
        hooked = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(ByDirection(WIDTH, WIDTH), *body, hooked, nn.Linear(WIDTH, WIDTH))


class Rotating(Sharded):
    """Has a buffer of a type that safetensors lacks, and a single number of it."""

    def model(self):
        network = super().model()
        angles = torch.arange(WIDTH, dtype=torch.float64)
        network.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles))
        network.register_buffer("rotation", network.rotations[1].clone())
        return network


class Optimized(Sharded):
    kind: Any = torch.optim.SGD
    more: Any = None

    def optimizer(self, model):
        return self.kind(model.parameters(), 0.01, **(self.more or {}))


class Breaking(Sharded):
    """The loss is not finite, but where it is tried."""

    def measure(self, outputs, batch):
        loss = super().measure(outputs, batch)["loss"]
        return {"loss": loss if self.share.alone else loss / 0}


class BreakingGradient(Sharded):
    """The gradient is not finite, though the loss is, but where it is tried."""

    def measure(self, outputs, batch):
        loss = super().measure(outputs, batch)["loss"]
        return {"loss": loss if self.share.alone else loss + (0 * loss).sqrt()}


# --- what is refused ---


class Unnamed(Kept):
    pass


class NoSuchLayer(Kept):
    fsdp_units = ("block.*",)


class AsManyAsFit(Sharded):
    micro_batch = -1


class Coupled(Sharded):
    def forward(self, model, batch):
        return model(batch - self.all_gather(batch).mean(0))


class Scalar(Sharded):
    def model(self):
        network = super().model()
        network.scale = nn.Parameter(torch.ones(()))
        return network


class Hooked(Sharded):
    def model(self):
        network = super().model()
        network.head.weight.register_hook(lambda gradient: 2 * gradient)
        return network


class Factored(Sharded):
    def optimizer(self, model):
        return torch.optim.Adafactor(model.parameters())


class Inside(Sharded):
    """Calls the layers that are inside of the network."""

    def forward(self, model, batch):
        return model.head(batch)


class Slopes(Sharded):
    """Of an energy, which follow weights that are cut by then."""

    def forward(self, model, batch):
        positions = batch.requires_grad_()
        return torch.autograd.grad(model(positions).tanh().sum(), positions, create_graph=True)[0]


class Followed(Sound):
    """A teacher follows its student within a unit, whose weights are whole only while it computes."""

    fsdp_units, body = ("1",), Follower


class InPlace(Sharded):
    """A unit begins with an activation that overwrites its input."""

    fsdp_units = ("1",)

    def model(self):
        unit = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), unit)


@functools.cache
def scale():
    return torch.ones(WIDTH)


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.scale = scale()

    def forward(self, features):
        return super().forward(features) * self.scale


class Cached(Sound):
    """Its second network has a tensor of the first."""

    fsdp_units, body = ("1",), Scaled
