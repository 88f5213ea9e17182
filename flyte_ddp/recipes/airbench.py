"""The network of airbench94, from Keller Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv 2404.00498."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES = 500  # each image has about a thousand patches, for a covariance of 12 by 12
EPSILON = 5e-4  # is added to the covariance's eigenvalues; the paper has this and all other constants here


class Airbench94(nn.Module):
    """A fixed whitening of patches, then three blocks of two convolutions: 1,972,504 parameters for (3, 32, 32).

    The filters of the whitening are a buffer: they depend on the training data, so files of weights must have them. In
    evaluation mode, the logits are the mean over an image and its mirror image.
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels = image_shape[0]
        self.whitening = nn.Conv2d(channels, 8 * channels, 2)
        filters = self.whitening.weight.detach()
        del self.whitening.weight  # parameters that are frozen are left out of files
        self.whitening.register_buffer("weight", filters)
        self.blocks = nn.Sequential(Block(8 * channels, 64), Block(64, 256), Block(256, 256))
        self.fc = nn.Linear(256, classes, bias=False)

    def whiten(self, images: Tensor) -> None:
        """Set the first layer's weights to filters that whiten patches of 2 by 2 pixels, and to the filters' negatives.

        On the patches of `images`, the outputs of the filters then have no correlation, and a variance of about 1.

        Args:
            images: (n, C, H, W), normalised training images.
        """
        # In float64 the rounded result is the same for any number of threads
        patches = F.unfold(images.double(), 2).transpose(1, 2).flatten(0, 1)
        variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = directions.T / (variances[:, None] + EPSILON).sqrt()
        with torch.no_grad():
            self.whitening.weight.copy_(torch.cat([filters, -filters]).view_as(self.whitening.weight))

    def forward(self, images: Tensor) -> Tensor:
        logits = self.logits(images)
        return logits if self.training else (logits + self.logits(images.flip(3))) / 2

    def logits(self, images: Tensor) -> Tensor:
        features = self.blocks(F.gelu(self.whitening(images)))
        return self.fc(features.amax((2, 3))).float() / 9


class Block(nn.Module):
    """Two convolutions, each with batch norm and GELU. They begin as the identity on their first channels."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(channels, filters)
        self.conv2, self.norm2 = _convolution(filters, filters)

    def forward(self, images: Tensor) -> Tensor:
        features = F.gelu(self.norm1(F.max_pool2d(self.conv1(images), 2)))
        return F.gelu(self.norm2(self.conv2(features)))


def _convolution(channels: int, filters: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(channels, filters, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight.detach()[:channels])
    norm = nn.BatchNorm2d(filters, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return convolution, norm
