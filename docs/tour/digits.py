"""What every step shares: handwritten digits from scikit-learn, a small network, and the order of an epoch."""

import hashlib

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TRAIN_IMAGES, TEST_IMAGES = 1600, 197
EPOCHS, BATCH_SIZE, LEARNING_RATE = 5, 100, 0.5


def split(name: str) -> tuple[Tensor, Tensor]:
    """The images of "train" or "test", (N, 64) float32 from 0 to 1, and their labels, (N,) int64."""
    images, labels = load_digits(return_X_y=True)
    part = slice(TRAIN_IMAGES) if name == "train" else slice(TRAIN_IMAGES, None)
    return torch.tensor(images[part] / 16, dtype=torch.float32), torch.tensor(labels[part])


def network() -> nn.Module:
    """Always with the same initial weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def shuffled(epoch: int) -> Tensor:
    """The order in which an epoch goes through the training images, the same in every process."""
    return torch.randperm(TRAIN_IMAGES, generator=torch.Generator().manual_seed(epoch))


def fingerprint(weights: dict[str, Tensor]) -> str:
    """A hash that changes with every bit of the weights."""
    digest = hashlib.sha256()
    for tensor in weights.values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]
