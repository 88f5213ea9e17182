"""The networks, by name. Each maps images (N, C, H, W), float and normalised, to log-probabilities (N, classes)."""

from pathlib import Path
from typing import Callable, Dict, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = Tuple[int, int, int]  # of an image: channels, height, width


class MnistCNN(nn.Module):
    """The tutorial's network (PyTorch's basic MNIST example): 431,080 parameters for (1, 28, 28) and ten classes.

    Pooling comes before the ReLU: the same values, for a quarter of the ReLU's work.
    """

    def __init__(self, image_shape: Shape, classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        pooled = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
        self.fc1 = nn.Linear(pooled[0] * pooled[1] * 50, 500)
        self.fc2 = nn.Linear(500, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(F.max_pool2d(self.conv1(images), 2))
        features = F.relu(F.max_pool2d(self.conv2(features), 2))
        features = F.relu(self.fc1(features.flatten(1)))
        # float() because under bfloat16 autocast the scores have 8 bits of precision, too few for a softmax
        return F.log_softmax(self.fc2(features).float(), dim=1)


MODELS: Dict[str, Callable[[Shape, int], nn.Module]] = {"mnist_cnn": MnistCNN}


def build_model(name: str, seed: int, image_shape: Shape, classes: int) -> nn.Module:
    """The named network with the initial weights that belong to the seed."""
    torch.manual_seed(seed)
    return MODELS[name](image_shape, classes)


def load_model(
    path: Union[str, Path], name: str = "mnist_cnn", image_shape: Shape = (1, 28, 28), classes: int = 10
) -> nn.Module:
    """The trained network from a model_state file, in evaluation mode on the CPU; nothing in the file is executed."""
    model = MODELS[name](image_shape, classes)
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()
