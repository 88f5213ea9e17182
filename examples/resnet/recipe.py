"""torchvision's ResNet-18 on a folder of images, which the ranks' loader workers read."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

from flyte_ddp import Classifier, Random, schedules


class ResNet(Classifier):
    samples, clip_norm = "images", 1.0

    def folder(self) -> ImageFolder:
        # Random changes of images are in augment()
        size = (self.settings.side, self.settings.side)
        grey = [0.5, 0.5, 0.5]
        return ImageFolder(str(self.data_path), Compose([Resize(size), ToTensor(), Normalize(grey, grey)]))

    def data(self, split: str) -> Dataset:
        folder = self.folder()
        return Subset(folder, [n for n in range(len(folder)) if (n % 5 == 0) == (split == "test")])

    def model(self) -> nn.Module:
        return models.resnet18(weights=None, num_classes=len(self.folder().classes))

    def augment(self, batch: Any, random: Random) -> Any:
        images, labels = batch
        return torch.where(random.uniform(1, 1, 1) < 0.5, images.flip(3), images), labels

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        hp = self.settings
        return torch.optim.AdamW(model.parameters(), hp.learning_rate, weight_decay=hp.weight_decay, fused=True)

    def lr_lambda(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps)
