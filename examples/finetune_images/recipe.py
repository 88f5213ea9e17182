"""A network of timm on a folder of images: `freeze` and `init` decide what of it is trained, and from where."""

from typing import Any

import timm
import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

from flyte_ddp import Classifier, Random, schedules


class FinetuneImages(Classifier):
    samples, clip_norm = "images", 1.0

    def folder(self) -> ImageFolder:
        size = (self.settings.side, self.settings.side)
        grey = [0.5, 0.5, 0.5]
        return ImageFolder(str(self.data_path), Compose([Resize(size), ToTensor(), Normalize(grey, grey)]))

    def data(self, split: str) -> Dataset:
        folder = self.folder()
        return Subset(folder, [n for n in range(len(folder)) if (n % 5 == 0) == (split == "test")])

    def model(self) -> nn.Module:
        return timm.create_model(self.settings.network, num_classes=len(self.folder().classes))

    def augment(self, batch: Any, random: Random) -> Any:
        images, labels = batch
        return torch.where(random.uniform(1, 1, 1) < 0.5, images.flip(3), images), labels

    def lr_lambda(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps)
