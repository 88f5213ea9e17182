"""The networks, by name. Each maps images (N, C, H, W), float and normalised, to logits (N, classes)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flyte_ddp.errors import InputError
from flyte_ddp.model_files.model_metadata import check_is_file, import_class, plain_remedy, read_metadata
from flyte_ddp.model_files.weights import load_weights
from flyte_ddp.recipe import Recipe
from flyte_ddp.recipes.airbench import Airbench94

OURS = "flyte_ddp.recipes.images:ImageClassifier"  # the class's name, because its module imports this one
MNIST = {"network": "mnist_cnn", "image_shape": (1, 28, 28), "classes": range(10)}
Shape = tuple[int, int, int]  # channels, height and width of an image


class MnistCNN(nn.Module):
    """The tutorial's network (PyTorch's basic MNIST example): 431,080 parameters for (1, 28, 28) and ten classes.

    Pooling comes before the ReLU: the result is the same, and the ReLU has a quarter of the work.
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
        # float() because under bfloat16 autocast the logits have 8 bits of precision, too few for a softmax
        return self.fc2(features).float()


class FashionCNN(nn.Module):
    """Two convolutions with batch norm, then two linear layers with dropout: 824,554 parameters for (1, 28, 28)."""

    def __init__(self, image_shape: Shape, classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(64)
        self.fc1 = nn.Linear(height // 4 * (width // 4) * 64, 256)
        self.dropout = nn.Dropout(0.25)
        self.fc2 = nn.Linear(256, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        features = F.max_pool2d(F.relu(self.norm2(self.conv2(features))), 2)
        features = self.dropout(F.relu(self.fc1(features.flatten(1))))
        return self.fc2(features).float()


class CifarCNN(nn.Module):
    """The network of Oracle's example: three convolutions (32, 64, 128 channels) and three linear layers (120, 84)."""

    def __init__(self, image_shape: Shape, classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.fc1 = nn.Linear(height // 8 * (width // 8) * 128, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        self.dropout = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        features = images
        for conv in (self.conv1, self.conv2, self.conv3):
            features = F.relu(F.max_pool2d(conv(features), 2))
        features = self.dropout(F.relu(self.fc1(features.flatten(1))))
        features = self.dropout(F.relu(self.fc2(features)))
        return self.fc3(features).float()


class ResNet9(nn.Module):
    """The nine-layer residual network of the DAWNBench entries for CIFAR-10 (David Page, 2018), whose width is 64.

    The number of channels starts at width and doubles three times. The cost grows with the square of width.
    """

    def __init__(self, image_shape: Shape, classes: int, width: int) -> None:
        super().__init__()
        self.prepare = _block(image_shape[0], width)
        self.layer1 = _block(width, 2 * width)
        self.residual1 = nn.Sequential(_block(2 * width, 2 * width), _block(2 * width, 2 * width))
        self.layer2 = _block(2 * width, 4 * width)
        self.layer3 = _block(4 * width, 8 * width)
        self.residual3 = nn.Sequential(_block(8 * width, 8 * width), _block(8 * width, 8 * width))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = F.max_pool2d(self.layer1(self.prepare(images)), 2)
        features = features + self.residual1(features)
        features = F.max_pool2d(self.layer2(features), 2)
        features = F.max_pool2d(self.layer3(features), 2)
        features = features + self.residual3(features)
        # Page scales the logits by an eighth, so that the softmax starts out flat
        return self.fc(features.amax((2, 3))).float() / 8


def _block(channels: int, filters: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU())


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mnist_cnn": MnistCNN,
    "fashion_cnn": FashionCNN,
    "cifar_cnn": CifarCNN,
    "resnet9": partial(ResNet9, width=64),
    "resnet9_small": partial(ResNet9, width=16),
    "airbench94": Airbench94,
}


def build_model(name: str, seed: int, image_shape: Shape, classes: int) -> nn.Module:
    """Return the named network with initial weights drawn from the seed."""
    torch.manual_seed(seed)
    return MODELS[name](image_shape, classes)


def load_model(
    path: str | Path,
    name: str | None = None,
    image_shape: Shape | None = None,
    classes: int | None = None,
    data_path: Path | None = None,
    init_path: Path | None = None,
) -> nn.Module:
    """Load the trained network from a model_state or safetensors file, in evaluation mode on the CPU.

    Nothing in the file is executed. But if a user's recipe trained the network and `name` is None, the modules of the
    recipe and of its settings are imported. The file names both, and may name any module that this process can import.
    If you do not trust a file, look at read_metadata(path).recipe and .settings_class first.

    Args:
        path: the file.
        name: a key of MODELS, to build that built-in network and import no recipe. The default is the network in the
            file's metadata; without metadata, MNIST's.
        image_shape: (C, H, W) of a built-in network. The default is in the metadata; without metadata, MNIST's.
        classes: the number of classes of a built-in network. The default is in the metadata; without metadata, ten.
        data_path: the data of the training, if the model() of a user's recipe needs them.
        init_path: the folder given to the training as init, if the model() of a user's recipe needs it.

    Raises:
        InputError: The file is missing or damaged, or does not fit the network. The recipe cannot be imported, or needs
            data_path or init_path. `name` is no key of MODELS.
        Exception: Whatever the user's recipe raises, if data_path is given or the training had no data.
    """
    check_is_file(path)
    metadata = read_metadata(path)
    if metadata and metadata.recipe != OURS and name is None:
        recipe = import_class(metadata.recipe, Recipe, f"{path}: the recipe")
        try:
            return recipe.load_model(path, data_path=data_path, init_path=init_path)
        except InputError:
            raise
        except Exception as error:
            if data_path or not metadata.data["digest"]:
                raise
            name = metadata.data["name"]
            raise InputError(f"{metadata.recipe} makes its network from its data, {name}: give data_path") from error
    known: dict[str, Any] = {**MNIST, **(metadata.facts if metadata else {})}
    shape = image_shape or tuple(known["image_shape"])
    network = name or known["network"]
    if network not in MODELS:
        raise InputError(
            f"the network must be one of {', '.join(MODELS)}, got {network!r}: correct name, or load {path} with the "
            "version that wrote it"
        )
    model = MODELS[network](shape, classes or len(known["classes"]))
    remedy = "give the name of its network, and image_shape and classes of what that was trained on"
    if not metadata:
        remedy += f", or {plain_remedy(path)}"
    return load_weights(model, path, remedy=remedy).eval()
