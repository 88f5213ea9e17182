"""Lightning's autoencoder, 784-64-3-64-784, as a recipe: the same job as workflows/autoencoder.py."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flyte_ddp import Measures, Recipe
from flyte_ddp.data.held_out import held_out
from flyte_ddp.data.prepared import prepared


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 784))

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


class AutoencoderRecipe(Recipe):
    samples, headline = "images", "loss"

    def __init__(self, settings: Any, data_path: Path | None = None):
        super().__init__(settings, data_path)
        if data_path:  # load_model needs none
            self.passes_per_epoch = prepared.read_description(data_path).passes_per_epoch

    def data(self, split: str) -> Tensor:
        if split == "test" and self.settings.evaluate_on == "test":
            return torch.from_numpy(prepared.open_split(self.data_path, "test")[0])
        images, labels = prepared.open_split(self.data_path, "train")
        return torch.from_numpy(images[held_out(labels) == (split == "test")])

    def model(self) -> nn.Module:
        return Autoencoder()

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch / 255)

    def measure(self, outputs: Tensor, batch: Tensor) -> Measures:
        return {"loss": (outputs.float() - batch.flatten(1) / 255).square().mean(1)}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.settings.learning_rate, fused=True)

    def constant_loss(self) -> float:
        """Of always predicting the mean image."""
        return float(np.var(self.data("test").numpy() / np.float32(255), axis=0).mean())

    def pictures(self, outputs: Tensor, batch: Tensor) -> list[tuple[str, Tensor]]:
        sides = torch.cat([batch / 255, outputs.view(batch.shape)], 3)
        return [("image, reconstruction", picture) for picture in sides[:8]]
