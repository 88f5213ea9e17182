"""The autoencoder: its network, and the LightningModule and LightningDataModule that train it.

Lightning is optional and takes seconds to import, so subclasses of its classes are defined inside functions.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from flyte_ddp.data import prepared
from flyte_ddp.data.held_out import held_out
from flyte_ddp.engine.batches import Batch, Resident, TestBatches, TrainBatches
from flyte_ddp.launch.environment import Environment
from flyte_ddp.weights import load_weights

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

PIXELS, HIDDEN, CODE = 28 * 28, 64, 3
EVALUATION_BATCH = 1000


class Autoencoder(nn.Module):
    """784-64-3-64-784, the autoencoder of Lightning's introduction: images (N, 1, 28, 28) from 0 to 1 to (N, 784)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS))

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


def build_autoencoder(seed: int) -> Autoencoder:
    """The network with initial weights drawn from the seed."""
    torch.manual_seed(seed)
    return Autoencoder()


def load_autoencoder(path: str | Path) -> Autoencoder:
    """The trained network from a model_state file, in evaluation mode on the CPU; nothing in the file is executed."""
    return load_weights(Autoencoder(), path).eval()


def squared_errors(network: nn.Module, images: Tensor) -> Tensor:
    """(N, 784), in float32 whatever the precision of the network."""
    return (network(images).float() - images.flatten(1)).square()


class Loader:
    """What Lightning iterates over in each epoch: this rank's images, and the number to average the loss over.

    That number is count or, if 0, the size of the global batch.
    """

    def __init__(self, steps: int, batches: Callable[[], Iterable[Batch]], count: int = 0):
        self._steps, self._batches, self._count = steps, batches, count

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for batch in self._batches():
            yield batch.share.own(batch.tree) / 255, self._count or batch.share.size


def lightning_module(network: Autoencoder, learning_rate: float) -> "LightningModule":
    """The network with its loss and optimizer."""
    from lightning.pytorch import LightningModule

    class LitAutoencoder(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: tuple[Tensor, int], _: int) -> Tensor:
            images, size = batch
            # DDP averages the ranks' gradients, which gives that of the global mean, however the batch was shared out
            loss = squared_errors(self.network, images).sum() * self.trainer.world_size / (size * PIXELS)
            self.log("train_loss_step", loss, on_step=True, on_epoch=False)  # of this rank: no wait for the others
            self.log("train_loss_epoch", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=size)
            return loss

        def validation_step(self, batch: tuple[Tensor, int], _: int) -> None:
            images, size = batch
            share = squared_errors(self.network, images).sum() / (size * PIXELS)
            # A sum, because Lightning divides a mean by the ranks' mean batch size rounded down to an integer
            self.log("validation_loss", share, sync_dist=True, reduce_fx="sum", batch_size=size)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=learning_rate)

    return LitAutoencoder()


def lightning_data(
    folder: Path, batch_size: int, seed: int, environment: Environment, device: torch.device
) -> "LightningDataModule":
    """The training images of a prepared dataset: eleven twelfths to train on, the others for validation."""
    from lightning.pytorch import LightningDataModule

    class PreparedImages(LightningDataModule):
        def prepare_data(self) -> None:
            """Verifies the data once per host, while Lightning makes the other ranks wait."""
            prepared.verify(folder)

        def setup(self, stage: str) -> None:
            passes = prepared.read_description(folder).passes_per_epoch
            images, labels = prepared.open_split(folder, "train")
            chosen, place = held_out(labels), (environment.rank, environment.world.size)
            # of always predicting the mean image
            self.constant_loss = float(np.var(images[chosen] / np.float32(255), axis=0).mean())
            train, validation = (Resident(images[rows], device) for rows in (~chosen, chosen))
            self.train = TrainBatches(train, batch_size, seed, *place, passes)
            self.validation = TestBatches(validation, EVALUATION_BATCH, *place)

        def train_dataloader(self) -> Loader:
            return Loader(len(self.train), lambda: self.train.epoch(self.trainer.current_epoch))  # type: ignore[union-attr]

        def val_dataloader(self) -> Loader:
            return Loader(len(self.validation), lambda: self.validation, self.validation.samples)

    return PreparedImages()


def encode_test_images(network: Autoencoder, folder: Path, path: Path) -> float:
    """Writes an .npz to path: `codes` (N, 3) float32 of all test images, `shown` (K,), the index of the first image of
    each class, and its `reconstructed` (K, 28, 28) uint8. Returns the mean squared error on the test images."""
    images, labels = prepared.open_split(folder, "test")
    codes, error = [], 0.0
    with torch.inference_mode():
        for part in torch.from_numpy(images).split(EVALUATION_BATCH):
            codes.append(network.encoder(part / 255))
            error += squared_errors(network, part / 255).sum().item()
        shown = np.unique(labels, return_index=True)[1]
        pixels = network(torch.from_numpy(images[shown]) / 255).clamp(0, 1).mul(255).round().to(torch.uint8)
    np.savez(
        path, codes=torch.cat(codes).numpy(), shown=shown, reconstructed=pixels.view(-1, *images.shape[2:]).numpy()
    )
    return error / (len(images) * PIXELS)
