"""A recipe that is right: those of other modules each change one thing of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flyte_ddp.fields import setting
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings

SIZE, WIDTH = 12, 8


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = setting(8, minimum=1)
    epochs: int = setting(1, minimum=1)
    precision: str = setting("float32", choices=("float32", "bfloat16"))


@dataclass(frozen=True)
class Named(Settings):
    """Its fields have the names of what stands beside settings in an identity, or in a tracker."""

    recipe: str = setting("")
    data: str = setting("")
    code: str = setting("")
    init: str = setting("")
    device: str = setting("")
    settings: dict = setting({})  # noqa: RUF009 copied


def table(seed=0):
    return np.random.default_rng(seed).normal(size=(SIZE, WIDTH)).astype(np.float32)


class Sound(Recipe):
    """What is right: the others change one thing of it."""

    body: Any = nn.Identity

    def data(self, split):
        return torch.from_numpy(table())

    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), self.body(), nn.Linear(WIDTH, WIDTH))

    def forward(self, model, batch):
        return model(batch)

    def measure(self, outputs, batch):
        return {"loss": (outputs - batch).square().mean(1)}


def body(forward):
    """A layer without parameters that does this to its features."""
    return type("Body", (nn.Module,), {"forward": lambda self, features: forward(features)})


class Validated(Sound):
    """Has a validation split of its own."""

    has_validation = True

    def data(self, split):
        return super().data(split)[:5] if split == "validation" else super().data(split)


class InPlace(Sound):
    """Changes the batch itself, which no other step sees again."""

    def augment(self, batch, random):
        return batch.add_(random.normal(WIDTH))

    def forward(self, model, batch):
        return model(batch.mul_(2))


class Reentrant(Sound):
    """Computes a layer again within the backward pass, by a backward pass of its own."""

    use_reentrant = True

    def forward(self, model, batch):
        first, *others = model
        return nn.Sequential(*others)(checkpoint(first, batch.requires_grad_(), use_reentrant=self.use_reentrant))


class NotReentrant(Reentrant):
    use_reentrant = False


class CheckpointedFirst(Sound):
    """Its network computes its first layer again, whose input needs no gradient: then torch gives the layer none."""

    class Network(nn.Sequential):
        def forward(self, features):
            return self[1](checkpoint(self[0], features, use_reentrant=True))

    def model(self):
        return self.Network(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    forward = Recipe.forward


class Forces(Sound):
    """The slopes of an energy at positions that are a leaf, in evaluation, too."""

    @torch.enable_grad()
    def forward(self, model, batch):
        positions = batch.clone().requires_grad_()
        energy = model(positions).tanh().sum()
        return torch.autograd.grad(energy, positions, create_graph=model.training)[0]


class Undirected(Sound):
    """Its headline may be better the more of it there is, or the less."""

    headline = "spread"

    def measure(self, outputs, batch):
        return {**super().measure(outputs, batch), "spread": outputs.std(1)}


class ViewOfWeights(Sound):
    """Returns a weight for each sample, in memory of its own for none."""

    def model(self):
        network = super().model()
        network.register_parameter("sigma", nn.Parameter(torch.zeros(1)))
        return network

    def forward(self, model, batch):
        return model(batch), model.sigma.expand(len(batch))

    def measure(self, outputs, batch):
        rows, sigma = outputs
        return {"loss": super().measure(rows, batch)["loss"] * torch.exp(-sigma) + sigma}


NotARecipe = Settings
