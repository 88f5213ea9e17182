"""The networks, by name. Each maps images (N, C, H, W), float and normalised, to log-probabilities (N, classes)."""

from pathlib import Path
from typing import Callable, Dict, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MnistCNN(nn.Module):
    """The tutorial's network (PyTorch's basic MNIST example): 431,080 parameters for (N, 1, 28, 28) and ten classes.

    Pooling comes before the ReLU: the same values, for a quarter of the ReLU's work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(4 * 4 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(F.max_pool2d(self.conv1(images), 2))
        features = F.relu(F.max_pool2d(self.conv2(features), 2))
        features = F.relu(self.fc1(features.flatten(1)))
        # float() because under bfloat16 autocast the scores have 8 bits of precision, too few for a softmax
        return F.log_softmax(self.fc2(features).float(), dim=1)


MODELS: Dict[str, Callable[[], nn.Module]] = {"mnist_cnn": MnistCNN}


def build_model(name: str, seed: int) -> nn.Module:
    """The named network with the initial weights that belong to the seed."""
    torch.manual_seed(seed)
    return MODELS[name]()


def load_model(path: Union[str, Path], name: str = "mnist_cnn") -> nn.Module:
    """The trained network from a model_state file, in evaluation mode on the CPU; nothing in the file is executed."""
    model = MODELS[name]()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()
