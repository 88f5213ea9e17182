"""Embeddings without labels: two views of a digit are pulled closer to each other than to all others (SimCLR)."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from flyte_ddp import Measures, Random, Recipe, schedules
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.recipes.images import shift

Views = tuple[Tensor, Tensor]


def view(images: Tensor, random: Random) -> Tensor:
    moved = shift(images, random.integers(-1, 2, 2), 1)
    return moved + 0.1 * random.normal(*images.shape[1:])


class Contrastive(Recipe):
    samples, headline, percent = "digits", "retrieval", ("retrieval",)

    def data(self, split: str) -> Views:
        images = torch.from_numpy(load_digits().images).float()[:, None] / 16
        chosen = images[(torch.arange(len(images)) % 5 == 0) == (split == "test")]
        if split == "train":
            return chosen, chosen
        # Test samples are not augmented: their views are made here, always the same ones
        random = Random(0, BatchShare(0, len(chosen), len(chosen)))
        return view(chosen, random), view(chosen, random)

    def augment(self, batch: Views, random: Random) -> Views:
        return view(batch[0], random), view(batch[1], random)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 16, 64),
        )  # fmt: skip

    def forward(self, model: nn.Module, batch: Views) -> Tensor:
        return torch.stack([F.normalize(model(images).float(), dim=1) for images in batch], 1)  # (n, 2, 64)

    def measure(self, outputs: Tensor, batch: Views) -> Measures:
        gathered = self.all_gather(outputs).flatten(0, 1)  # (2 N, 64), the views of a sample next to each other
        places = 2 * self.share.first + torch.arange(2 * len(outputs), device=outputs.device)
        scores = (outputs.flatten(0, 1) @ gathered.T / self.settings.temperature).scatter(1, places[:, None], -1e9)
        other_views = places ^ 1
        loss = F.cross_entropy(scores, other_views, reduction="none")
        is_nearest = (scores.argmax(1) == other_views).float()
        return {"loss": loss.view(-1, 2).mean(1), "retrieval": is_nearest.view(-1, 2).mean(1)}

    def lr_lambda(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps)
