"""The frequency of noisy waves, read block by block from where they are stored."""

import torch
from torch import Tensor, nn

from flyte_ddp import BlockFolder, Measures, Recipe


class Stream(Recipe):
    samples, headline, percent = "waves", "within", ("within",)

    def data(self, split: str) -> BlockFolder:
        return BlockFolder(f"{self.data_path}/{split}")

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["wave"])[:, 0].float()

    def measure(self, outputs: Tensor, batch: dict[str, Tensor]) -> Measures:
        error = (outputs - batch["frequency"]).abs()
        return {"loss": error.square(), "within": error < 0.1}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.settings.learning_rate, fused=True)
