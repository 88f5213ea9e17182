"""The built-in recipe, which classifies the images of a prepared dataset or of a folder of files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flyte_ddp import schedules
from flyte_ddp.data.image_files import ImageFiles
from flyte_ddp.data.prepared import prepared
from flyte_ddp.recipe import Random
from flyte_ddp.recipes import models
from flyte_ddp.recipes.airbench import SAMPLES, Airbench94
from flyte_ddp.recipes.classifier import Classifier
from flyte_ddp.recipes.hyperparameters import Hyperparameters


class ImageClassifier(Classifier):
    """A recipe for a network of flyte_ddp.recipes.models on the prepared dataset in the folder data_path."""

    samples = "images"

    def __init__(self, settings: Hyperparameters, data_path: Path | None = None):
        super().__init__(settings, data_path)
        assert data_path is not None  # the task always gives a folder
        self.description = prepared.read_description(data_path)
        self.folder = data_path
        self.passes_per_epoch = self.description.passes_per_epoch
        self.train_fraction = settings.train_fraction
        self.clip_norm = settings.clip_norm
        self.ema_decay = settings.ema_decay
        self.label_smoothing = settings.label_smoothing

    def facts(self) -> dict[str, Any]:
        description = self.description
        return {
            "network": self.settings.model,
            "image_shape": list(description.image_shape),
            "classes": list(description.classes),
            "mean": list(description.mean),
            "std": list(description.std),
        }

    def data(self, split: str) -> Any:
        images, labels = prepared.open_images(self.folder, split)
        if isinstance(images, ImageFiles):
            return LabelledFiles(images, labels)
        return torch.from_numpy(images), torch.from_numpy(labels)

    def model(self) -> nn.Module:
        self.normalise = Normaliser(self.description.mean, self.description.std, self.device)
        model = models.MODELS[self.settings.model](self.description.image_shape, len(self.description.classes))
        if isinstance(model, Airbench94):
            images = prepared.open_images(self.folder, "train")[0]
            some = [images[index] for index in np.linspace(0, len(images) - 1, SAMPLES, dtype=int)]
            model.whiten(self.normalise(torch.from_numpy(np.stack(some)).to(self.device)).cpu())
        return model.to(memory_format=torch.channels_last)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores: Tensor = model(self.normalise(batch[0]))
        return scores

    def augment(self, batch: tuple[Tensor, Tensor], random: Random) -> tuple[Tensor, Tensor]:
        images = batch[0]
        reach = self.settings.shift_pixels
        if self.settings.flip:
            images = torch.where(self.mirrored(images, random), images.flip(3), images)
        if reach:
            images = shift(images, random.integers(-reach, reach + 1, 2), reach)
        return images, batch[1]

    def mirrored(self, images: Tensor, random: Random) -> Tensor:
        """Choose which images to mirror, and return a mask (n, 1, 1, 1) bool that is True for them.

        Each image has a chance of 1/2. With settings.alternate_flips, each image is mirrored in every other epoch
        instead: about half of the images in even epochs, the others in odd epochs.

        Args:
            images: (n, C, H, W) uint8, not augmented yet: with alternate_flips, their sums of pixels decide when.
            random: the random numbers and the epoch of the step.
        """
        if not self.settings.alternate_flips:
            return random.integers(0, 2, 1, 1, 1).bool()
        # The parity of the sum of an image's pixels is like a coin toss that always has the same outcome
        return (images.sum((1, 2, 3), keepdim=True, dtype=torch.int64) + random.epoch) % 2 == 1

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        hp = self.settings
        return torch.optim.SGD(
            parameter_groups(model, hp), hp.learning_rate, hp.sgd_momentum, weight_decay=hp.weight_decay,
            nesterov=hp.nesterov and hp.sgd_momentum > 0, fused=True,
        )  # fmt: skip

    def lr_lambda(self, step: int, steps: int) -> float:
        if self.settings.schedule == "constant":
            return 1.0
        return schedules.one_cycle(step, steps, self.settings.warmup_fraction)

    def constant_loss(self) -> float:
        # With a validation split, nothing may use the test labels before the end
        split = "train" if self.settings.validation_fraction else "test"
        return entropy(torch.from_numpy(prepared.open_images(self.folder, split)[1]))


def parameter_groups(model: nn.Module, hp: Hyperparameters) -> list[dict[str, Any]]:
    """Return the network's parameters as groups for one of torch's optimizers.

    Returns:
        One group of all parameters if hp.norm_bias_factor is 1 or there is no batch norm. Otherwise two: first all
        parameters but the biases of batch norm, then these biases, with learning rate times the factor and weight decay
        divided by it.
    """
    norms = [layer for layer in model.modules() if hasattr(layer, "running_mean")]
    biases = [layer.bias for layer in norms if layer.bias is not None]
    if hp.norm_bias_factor == 1 or not biases:
        return [{"params": list(model.parameters())}]
    others = [parameter for parameter in model.parameters() if all(parameter is not bias for bias in biases)]
    rate = hp.learning_rate * hp.norm_bias_factor
    decay = hp.weight_decay / hp.norm_bias_factor
    return [{"params": others}, {"params": biases, "lr": rate, "weight_decay": decay}]


class Normaliser:
    """A function from pixels (n, C, H, W) uint8 to float32 with mean 0 and standard deviation 1 by channel."""

    def __init__(self, means: Sequence[float], deviations: Sequence[float], device: torch.device):
        """Prepare one multiplication and one addition.

        Args:
            means: the mean of each channel, for pixels from 0 to 1.
            deviations: the standard deviation of each channel, for pixels from 0 to 1.
            device: where the images are.
        """
        mean = torch.tensor(means)
        std = torch.tensor(deviations)
        # (x / 255 - mean) / std is x * scale + offset
        self.scale = (1 / (255 * std)).view(1, -1, 1, 1).to(device)
        self.offset = (-mean / std).view(1, -1, 1, 1).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.offset, images, self.scale).contiguous(memory_format=torch.channels_last)


class LabelledFiles(torch.utils.data.Dataset[Any]):
    """Image files and their classes, as a Dataset."""

    def __init__(self, files: ImageFiles, labels: np.ndarray):
        self.files = files
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def read_batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read the images at these indices, and return them as (n, C, H, W) uint8, with their labels (n,) int64.

        Raises DataError, which names the file, if a file is missing or cannot be decoded.
        """
        images = np.empty((len(indices), *self.files.shape), np.uint8)
        for image, index in zip(images, indices, strict=True):
            image[:] = self.files[index]
        return images, self.labels[indices]


def shift(images: Tensor, offsets: Tensor, reach: int) -> Tensor:
    """Shift each image by an offset of its own, pad with zeros, and return the images as a new tensor.

    Args:
        images: (n, C, H, W), of any dtype, which the result has, too.
        offsets: (n, 2) whole numbers from -reach to reach: by how many pixels down, and right.
        reach: the largest offset in pixels.
    """
    n, _, height, width = images.shape
    padded = F.pad(images, (reach, reach, reach, reach))
    rows = torch.arange(height, device=images.device) + reach - offsets[:, :1]
    columns = torch.arange(width, device=images.device) + reach - offsets[:, 1:]
    which = torch.arange(n, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def entropy(labels: Tensor) -> float:
    """Return the entropy of the frequencies of labels (N,) int64: the lowest mean loss of a constant prediction."""
    counts = labels.bincount().double()
    return torch.special.entr(counts / counts.sum()).sum().item()
