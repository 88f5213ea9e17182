"""The recipe: data, network and measures. flyte_ddp/recipe.py describes what else a recipe can have."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from flyte_ddp import Measures, Recipe, schedules
from my_project.settings import Settings


class Network(nn.Module):
    """Maps images (n, 64) to logits (n, 10)."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.hidden, self.dropout, self.head = nn.Linear(64, width), nn.Dropout(dropout), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.hidden(images))))


class Digits(Recipe):
    settings: Settings
    samples, headline = "digits", "accuracy"

    def data(self, split: str) -> "tuple[Tensor, Tensor]":
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        chosen = (torch.arange(len(labels)) % 5 == 0) == (split == "test")
        return images[chosen].float() / 16, labels[chosen]

    def model(self) -> nn.Module:
        return Network(self.settings.width, self.settings.dropout)

    def measure(self, outputs: Tensor, batch: "tuple[Tensor, Tensor]") -> Measures:
        labels = batch[1]
        loss = F.cross_entropy(outputs.float(), labels, reduction="none")
        return {"loss": loss, "accuracy": outputs.argmax(1) == labels}

    def lr_lambda(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps)
