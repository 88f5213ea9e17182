"""Steps 6 to 8: the same data and network for the library."""

import torch
from torch import Tensor, nn

from digits import network, split
from flyte_ddp import Classifier


class Digits(Classifier):
    samples = "images"

    def data(self, split_name: str) -> tuple[Tensor, Tensor]:
        return split(split_name)

    def model(self) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), self.settings.learning_rate, momentum=0.5)
