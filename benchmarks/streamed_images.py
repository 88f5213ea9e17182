"""The recipe of benchmarks.streaming: images from blocks, or the same ones in memory."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flyte_ddp.data.blocks.block_folder import BlockFolder
from flyte_ddp.fields import setting
from flyte_ddp.recipes.classifier import Classifier
from flyte_ddp.settings import TrainingSettings


@dataclass(frozen=True)
class Settings(TrainingSettings):
    source: str = setting("")  # of the blocks: a URL or folder; "memory:" before it loads them all first
    width: int = setting(0, minimum=0)
    channels: int = setting(3, minimum=1)
    window: int = setting(2048, minimum=1)
    learning_rate: float = setting(1e-3, above=0)


class Images(Classifier):
    """Images (n, C, H, W) uint8 and labels in blocks."""

    samples = "images"

    def data(self, split: str) -> Any:
        blocks = BlockFolder(f"{self.settings.source.removeprefix('memory:')}/{split}")
        blocks.window = self.settings.window
        if not self.settings.source.startswith("memory:"):
            return blocks
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, str(number)) for number in range(len(blocks.lengths))]
            for number, path in enumerate(paths):
                blocks.fetch(number, path)
            rows = np.concatenate([np.load(path) for path in paths])
        return torch.from_numpy(rows["0"].copy()), torch.from_numpy(rows["1"].copy())

    def model(self) -> nn.Module:
        width, channels = self.settings.width, self.settings.channels
        if not width:
            return nn.Sequential(nn.AdaptiveAvgPool2d(16), nn.Flatten(), nn.Linear(256 * channels, 10))
        layers = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10))

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0].float() / 255)
