"""The autoencoder as a LightningModule, and a prepared dataset as a LightningDataModule."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from flyte_ddp.autoencoder.network import PIXELS, Autoencoder
from flyte_ddp.autoencoder.settings import AutoencoderHyperparameters
from flyte_ddp.data.held_out import held_out
from flyte_ddp.data.prepared import prepared
from flyte_ddp.engine.batches.batches import Batch, EvaluationBatches, TrainBatches
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.report.figures import cloud
from flyte_ddp.whole_files import whole_file, write_whole

EVALUATION_BATCH = 1000
MOST_POINTS = 2000  # of a cloud: the page stays below a megabyte
VIEWS = (30, 120)  # degrees around the vertical


class LitAutoencoder(LightningModule):
    """The network with its loss, the mean squared error per pixel, and its optimizer."""

    def __init__(self, learning_rate: float):
        super().__init__()
        network = Autoencoder()
        self.encoder, self.decoder, self.learning_rate = network.encoder, network.decoder, learning_rate

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))

    def share(self, batch: tuple[Tensor, int]) -> Tensor:
        """This rank's share of the mean over a global batch, or split, of size images."""
        images, size = batch
        return (self(images).float() - images.flatten(1)).square().sum() / (size * PIXELS)

    def training_step(self, batch: tuple[Tensor, int], batch_idx: int) -> Tensor:
        # DDP averages the ranks' gradients, which gives that of the global mean, however the batch was shared out
        return self.share(batch) * self.trainer.world_size

    def validation_step(self, batch: tuple[Tensor, int], batch_idx: int) -> None:
        # A sum, because Lightning divides a mean by the ranks' mean batch size rounded down to an integer
        self.log("validation_loss", self.share(batch), sync_dist=True, reduce_fx="sum", batch_size=batch[1])

    def test_step(self, batch: tuple[Tensor, int], batch_idx: int) -> None:
        self.log("test_loss", self.share(batch), sync_dist=True, reduce_fx="sum", batch_size=batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    def on_test_end(self) -> None:
        if self.trainer.is_global_zero:
            data: PreparedImages = self.trainer.datamodule  # type: ignore[attr-defined]
            show_codes(self, data.folder, Path(self.trainer.default_root_dir))


class PreparedImages(LightningDataModule):
    """Images of a prepared dataset: eleven twelfths of the training images to train on, the others for validation."""

    is_same_on_any_ranks = True  # batches are of all ranks together, and the network draws nothing

    def __init__(self, data_path: Path, settings: AutoencoderHyperparameters):
        super().__init__()
        self.folder, self.batch_size, self.seed = data_path, settings.batch_size, settings.seed

    def prepare_data(self) -> None:
        """Verifies the data once per host, while Lightning makes the other ranks wait."""
        prepared.verify(self.folder)

    def setup(self, stage: str) -> None:
        trainer = self.trainer
        assert trainer is not None
        self.rank_and_size = trainer.global_rank, trainer.world_size
        resident = partial(Resident, device=trainer.strategy.root_device)
        if stage == "test":
            images = prepared.open_split(self.folder, "test")[0]
            self.test = EvaluationBatches(resident(images), EVALUATION_BATCH, *self.rank_and_size)
            return
        images, labels = prepared.open_split(self.folder, "train")
        chosen, passes = held_out(labels), prepared.read_description(self.folder).passes_per_epoch
        # of always predicting the mean image
        self.constant_loss = float(np.var(images[chosen] / np.float32(255), axis=0).mean())
        self.train = TrainBatches(resident(images[~chosen]), self.batch_size, self.seed, *self.rank_and_size, passes)
        self.validation = EvaluationBatches(resident(images[chosen]), EVALUATION_BATCH, *self.rank_and_size)

    def train_dataloader(self) -> "Loader":
        return Loader(self.train, lambda: self.train.epoch(*self.next_step()))

    def val_dataloader(self) -> "Loader":
        return Loader(self.validation, lambda: self.validation, self.validation.samples)

    def test_dataloader(self) -> "Loader":
        return Loader(self.test, lambda: self.test, self.test.samples)

    def next_step(self) -> tuple[int, int]:
        """Epoch and step: after a resume, those that the checkpoint was saved before."""
        trainer = self.trainer
        assert trainer is not None
        return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx + 1


class Loader:
    """What Lightning iterates over in each epoch: this rank's images, and the number to average the loss over.

    That number is count or, if 0, the size of the global batch. Having a state, though an empty one, tells Lightning
    that it can go on within an epoch.
    """

    def __init__(
        self, all_batches: TrainBatches | EvaluationBatches, batches: Callable[[], Iterable[Batch]], count: int = 0
    ):
        self.dataset, self.batch_size = all_batches.split, all_batches.batch_size / all_batches.world_size
        self._steps, self._batches, self._count = len(all_batches), batches, count

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for batch in self._batches():
            yield batch.share.own(batch.tree) / 255, self._count or batch.share.size

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None: ...


@torch.inference_mode()
def show_codes(module: LitAutoencoder, folder: Path, logs: Path) -> None:
    """Writes test.npz, with `codes` (N, 3) float32 of all test images, and for the report the first test image of each
    class beside its reconstruction, and the codes in 3D."""
    images, labels = prepared.open_split(folder, "test")
    classes = prepared.read_description(folder).classes
    parts = torch.from_numpy(images).split(EVALUATION_BATCH)
    codes = torch.cat([module.encoder(part.to(module.device) / 255).cpu() for part in parts]).numpy()
    with whole_file(logs / "test.npz") as file:
        np.savez(file, codes=codes)
    shown = np.unique(labels, return_index=True)[1]
    pixels = module.decoder(torch.from_numpy(codes[shown]).to(module.device)).clamp(0, 1).mul(255).round().byte()
    sides = np.concatenate([images[shown], pixels.cpu().view(-1, *images.shape[1:]).numpy()], axis=3)
    captions = np.array([f"{classes[labels[index]]}, and reconstructed" for index in shown])
    with whole_file(logs / "pictures.npz") as file:
        np.savez(file, captions=captions, **{str(number): pair for number, pair in enumerate(sides)})
    some = slice(MOST_POINTS)
    what = f"Codes of {len(codes[some]):,} test images in 3D, coloured by class"
    names = [name.partition(" - ")[0] for name in classes]  # MNIST's are "0 - zero" and so on
    (logs / "figures").mkdir(exist_ok=True)
    for turned in VIEWS:
        path = logs / "figures" / f"Codes of test images, seen from {turned}°.svg"
        write_whole(path, cloud(codes[some], labels[some], names, turned, what).encode())
