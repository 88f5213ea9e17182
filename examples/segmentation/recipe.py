"""A small U-Net that finds the pixels of a noisy image that are strokes of digits (Ronneberger et al., 2015)."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from flyte_ddp import Measures, Random, Recipe


def block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.fine, self.coarse, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up, self.top = block(6 * width, 2 * width), block(3 * width, width)
        self.dropout, self.head = nn.Dropout2d(dropout), nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        coarse = self.coarse(F.max_pool2d(fine, 2))
        bottom = self.dropout(self.bottom(F.max_pool2d(coarse, 2)))
        up = self.up(torch.cat([coarse, F.interpolate(bottom, scale_factor=2)], 1))
        return self.head(self.top(torch.cat([fine, F.interpolate(up, scale_factor=2)], 1)))


class Segmentation(Recipe):
    samples, headline, percent = "images", "iou", ("iou", "dice")

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng(0)
        digits = load_digits().images.repeat(2, 1).repeat(2, 2)
        clean = np.zeros((self.settings.images, 1, 32, 32), np.float32)
        for image in clean:
            for left, top, digit in zip((0, 16), random.integers(0, 17, 2), random.choice(digits, 2), strict=True):
                image[0, top : top + 16, left : left + 16] = digit / 16
        noisy = clean + random.normal(0, 0.3, clean.shape).astype(np.float32)
        chosen = (np.arange(len(clean)) % 5 == 0) == (split == "test")
        return torch.from_numpy(noisy[chosen]), torch.from_numpy(clean[chosen] > 0.4)

    def model(self) -> nn.Module:
        return UNet(self.settings.width, self.settings.dropout)

    def augment(self, batch: tuple[Tensor, Tensor], random: Random) -> tuple[Tensor, ...]:
        is_flipped = random.uniform(1, 1, 1) < 0.5
        return tuple(torch.where(is_flipped, images.flip(3), images) for images in batch)

    def measure(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Measures:
        loss = F.binary_cross_entropy_with_logits(outputs.float(), batch[1].float(), reduction="none").mean((1, 2, 3))
        found, true = outputs > 0, batch[1]
        both, either, sizes = (x.sum((1, 2, 3)) for x in (found & true, found | true, found.int() + true))
        return {"loss": loss, "iou": (both, either), "dice": (2 * both, sizes)}

    def pictures(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> list[tuple[str, Tensor]]:
        return [("image, truth, prediction", one) for one in torch.cat([*batch, outputs.sigmoid()], 3)[:8]]
