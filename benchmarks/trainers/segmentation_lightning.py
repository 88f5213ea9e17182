"""The U-Net as a user of Lightning trains it. Its sync_batchnorm is for GPUs: torch's SyncBatchNorm refuses a CPU."""

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from segmentation.recipe import Segmentation, UNet
from segmentation.settings import Settings
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryF1Score, BinaryJaccardIndex


class UNetModule(LightningModule):
    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings
        self.model = UNet(settings.width, settings.dropout)
        self.loss, self.iou, self.dice = MeanMetric(), BinaryJaccardIndex(), BinaryF1Score()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        is_flipped = torch.rand(len(batch[0]), 1, 1, 1, device=self.device) < 0.5
        images, truth = (torch.where(is_flipped, part.flip(3), part) for part in batch)
        return F.binary_cross_entropy_with_logits(self.model(images), truth.float())

    def validation_step(self, batch: list[Tensor]) -> None:
        images, truth = batch
        logits = self.model(images)
        self.loss.update(F.binary_cross_entropy_with_logits(logits, truth.float()), len(images))
        self.iou.update(logits > 0, truth)
        self.dice.update(logits > 0, truth)
        self.log_dict({"loss": self.loss, "iou": self.iou, "dice": self.dice}, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.settings.learning_rate, fused=True)


def main(settings: Settings, ranks: int) -> dict[str, float]:
    seed_everything(settings.seed)
    train, test = (TensorDataset(*Segmentation(settings).data(split)) for split in ("train", "test"))
    module = UNetModule(settings)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto",
        max_epochs=settings.epochs,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        module,
        DataLoader(train, settings.batch_size // ranks, shuffle=True),
        DataLoader(test, settings.test_batch_size // ranks),
        ckpt_path="last",
    )
    if trainer.is_global_zero:
        torch.save(module.model.state_dict(), "model.pt")
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    main(Settings(), 2)
