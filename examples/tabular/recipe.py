"""Regression on a table: how far a patient's diabetes has progressed after a year, from ten measurements."""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from flyte_ddp import Measures, Recipe, schedules


class Tabular(Recipe):
    samples = "patients"
    headline = "r2"
    higher_is_better = ("r2",)
    percent = ()

    def data(self, split: str) -> tuple[Tensor, Tensor, Tensor]:
        table = np.column_stack(load_diabetes(return_X_y=True, scaled=False)).astype(np.float32)
        is_test = np.arange(len(table)) % 5 == 0
        known = table[~is_test]
        rows = torch.from_numpy((table[is_test == (split == "test")] - known.mean(0)) / known.std(0))
        inputs, target = rows[:, :-1], rows[:, -1]
        return inputs, target, (target - target.mean()).square()

    def model(self) -> nn.Module:
        width, dropout = self.settings.width, self.settings.dropout
        return nn.Sequential(
            nn.Linear(10, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(width, 1),
        )  # fmt: skip

    def measure(self, outputs: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Measures:
        _, target, spread = batch
        error = (outputs[:, 0].float() - target).square()
        # R2 is the sum of spread - error over the sum of spread, that is, values with weights
        return {"loss": error, "r2": (spread - error, spread)}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        hp = self.settings
        return torch.optim.AdamW(model.parameters(), hp.learning_rate, weight_decay=hp.weight_decay, fused=True)

    def lr_lambda(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps)
