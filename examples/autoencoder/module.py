"""Lightning's autoencoder, 784-64-3-64-784, as a LightningModule that knows nothing of Flyte."""

from pathlib import Path

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from flyte_ddp.data.prepared import prepared


class LitAutoencoder(LightningModule):
    def __init__(self, learning_rate: float):
        super().__init__()
        self.learning_rate = learning_rate
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 784))

    def measured(self, batch: list[Tensor], split: str) -> Tensor:
        images = batch[0] / 255
        loss = nn.functional.mse_loss(self.decoder(self.encoder(images)), images.flatten(1))
        self.log(f"{split}_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.measured(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.measured(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.measured(batch, "test")
        if batch_idx == 0 and self.trainer.is_global_zero:  # the report shows these pictures
            images = batch[0][:8] / 255
            pairs = torch.cat([images, self.decoder(self.encoder(images)).view(images.shape)], 3)
            pictures = pairs.clamp(0, 1).mul(255).byte().cpu().numpy()
            named = {str(number): picture for number, picture in enumerate(pictures)}
            captions = np.array(["image, reconstruction"] * len(pictures))
            np.savez(Path(self.trainer.default_root_dir, "pictures.npz"), captions=captions, **named)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.learning_rate)


class PreparedImages(LightningDataModule):
    def __init__(self, data_path: Path, batch_size: int):
        super().__init__()
        self.data_path = data_path
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        train, test = (torch.from_numpy(prepared.open_split(self.data_path, split)[0]) for split in ("train", "test"))
        self.test = TensorDataset(test)
        self.train, self.val = random_split(TensorDataset(train), (11 / 12, 1 / 12))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 500)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 500)
