"""Batches from a split of a dataset: which samples, in which order, moved and normalised."""

from dataclasses import dataclass
from typing import Iterator, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's share of one global batch.

    Attributes:
        images: (n, C, H, W) float32, normalised; n may be 0 in a last short batch.
        labels: (n,) int64.
        first: position of the share in the global batch.
        size: samples of the whole global batch, all ranks together.
    """

    images: Tensor
    labels: Tensor
    first: int
    size: int


def share(start: int, stop: int, rank: int, world_size: int) -> Tuple[int, int]:
    """The rank's part of start..stop: contiguous, without overlap or gap, sizes at most one apart."""
    count = stop - start
    return start + count * rank // world_size, start + count * (rank + 1) // world_size


class Split:
    """The images (N, C, H, W) uint8 and labels (N,) of a split, resident on a device."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: Tuple[float, ...],
        std: Tuple[float, ...],
        device: torch.device,
    ):
        self.images = torch.from_numpy(images).to(device)
        self.labels = torch.from_numpy(labels).to(device, torch.int64)
        # (x / 255 - mean) / std as one multiplication and one addition
        self.scale = (1 / (255 * torch.tensor(std))).view(1, -1, 1, 1).to(device)
        self.offset = (-torch.tensor(mean) / torch.tensor(std)).view(1, -1, 1, 1).to(device)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.labels.device

    def fetch(self, order: Tensor, parts: Sequence[slice]) -> Iterator[Tuple[Tensor, Tensor]]:
        """The images (n, C, H, W) uint8 and labels (n,) of each part of an order (indices into the split), by turns."""
        order = order.to(self.device)
        for part in parts:
            yield self.images[order[part]], self.labels[order[part]]

    def normalised(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.offset, images, self.scale).contiguous(memory_format=torch.channels_last)


class TrainBatches:
    """A rank's shares of the shuffled global batches; a pure function of seed, epoch and step.

    Nothing depends on what ran before or on the number of ranks, so a resume in the middle of an epoch and a change of
    world size continue with the very samples that an undisturbed run would see.
    """

    def __init__(
        self,
        split: Split,
        passes: int,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        *,
        train_fraction: float = 1.0,
        shift_pixels: int = 0,
        flip: bool = False,
    ):
        self.split, self.passes, self.batch_size, self.seed = split, passes, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.shift_pixels, self.flip = shift_pixels, flip
        self.samples = max(1, round(len(split) * passes * train_fraction))  # of one epoch

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def samples_until(self, step: int) -> int:
        """Samples in the first so many steps of an epoch."""
        return min(self.samples, step * self.batch_size)

    def mine(self, step: int) -> slice:
        """This rank's share of a step's global batch, as places in the epoch's order."""
        return slice(*share(self.samples_until(step), self.samples_until(step + 1), self.rank, self.world_size))

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from first_step on; the last one may be short."""
        device = self.split.device
        generator = torch.Generator().manual_seed(self.seed * 2**20 + epoch)
        order = torch.cat([torch.randperm(len(self.split), generator=generator) for _ in range(self.passes)])
        order = order[: self.samples].to(device)
        reach = self.shift_pixels
        shifts = torch.randint(-reach, reach + 1, (self.samples, 2), generator=generator).to(device) if reach else None
        flips = torch.randint(2, (self.samples, 1, 1, 1), generator=generator).bool().to(device) if self.flip else None
        # Not torch.manual_seed: without a GPU it formats tracebacks, by which a step on the CPU takes 2 to 4 % longer
        dropout = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        steps = range(first_step, len(self))
        parts = [self.mine(step) for step in steps]
        for step, part, (images, labels) in zip(steps, parts, self.split.fetch(order, parts), strict=True):
            # dropout draws from the device's own generator: its state, too, follows from the position alone
            dropout.manual_seed(((self.seed * 2**10 + epoch) * 2**20 + step) % 2**64)
            if shifts is not None:
                images = shift(images, shifts[part], reach)
            if flips is not None:
                images = torch.where(flips[part], images.flip(3), images)
            start, stop = self.samples_until(step), self.samples_until(step + 1)
            yield Batch(self.split.normalised(images), labels, part.start - start, stop - start)


def shift(images: Tensor, offsets: Tensor, reach: int) -> Tensor:
    """Moves each image (n, C, H, W) by its own (down, right) of at most reach pixels; zeros follow."""
    n, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (reach, reach, reach, reach))
    rows = torch.arange(height, device=images.device) + reach - offsets[:, :1]
    columns = torch.arange(width, device=images.device) + reach - offsets[:, 1:]
    which = torch.arange(n, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class TestBatches:
    """A rank's contiguous share of the test split, in batches of at most batch_size; no sample twice on any rank."""

    def __init__(self, split: Split, batch_size: int, rank: int, world_size: int):
        self.split, self.batch_size = split, batch_size
        self.first, self.last = share(0, len(split), rank, world_size)

    def __iter__(self) -> Iterator[Batch]:
        # one batch at least, if an empty one: every rank has scores to contribute
        starts = range(self.first, max(self.last, self.first + 1), self.batch_size)
        mine = [slice(start, min(self.last, start + self.batch_size)) for start in starts]
        for part, (images, labels) in zip(mine, self.split.fetch(torch.arange(len(self.split)), mine), strict=True):
            yield Batch(self.split.normalised(images), labels, part.start, len(self.split))
