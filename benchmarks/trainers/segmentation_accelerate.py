"""The U-Net as a user of Accelerate trains it; torch's SyncBatchNorm, which is for GPUs, refuses a CPU."""

from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from segmentation.recipe import Segmentation, UNet
from segmentation.settings import Settings
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryF1Score, BinaryJaccardIndex


@torch.inference_mode()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    model.eval()
    # gather_for_metrics gives every rank all samples, so they must not be added up once more
    loss = MeanMetric(sync_on_compute=False)
    shares = MetricCollection(
        {"iou": BinaryJaccardIndex(sync_on_compute=False), "dice": BinaryF1Score(sync_on_compute=False)}
    )
    for images, truth in loader:
        logits, truth = accelerator.gather_for_metrics((model(images), truth))
        loss.update(F.binary_cross_entropy_with_logits(logits, truth.float()), len(truth))
        shares.update(logits > 0, truth)
    return {"loss": float(loss.compute()), **{name: float(share) for name, share in shares.compute().items()}}


def main(settings: Settings, ranks: int) -> dict[str, float]:
    """ranks: which torchrun has started."""
    # One batch shared out, in an order that a resumed epoch has again
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    set_seed(settings.seed)
    train, test = (TensorDataset(*Segmentation(settings).data(split)) for split in ("train", "test"))
    model = UNet(settings.width, settings.dropout)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), settings.learning_rate, fused=True),
        DataLoader(train, settings.batch_size, shuffle=True),
        DataLoader(test, settings.test_batch_size),
    )
    first_epoch = len(list(Path().glob("checkpoints/epoch_*")))
    if first_epoch:
        accelerator.load_state(f"checkpoints/epoch_{first_epoch - 1}")
    for epoch in range(first_epoch, settings.epochs):
        model.train()
        train_loader.set_epoch(epoch)
        for batch in train_loader:
            is_flipped = torch.rand(len(batch[0]), 1, 1, 1, device=accelerator.device) < 0.5
            images, truth = (torch.where(is_flipped, part.flip(3), part) for part in batch)
            optimizer.zero_grad()
            accelerator.backward(F.binary_cross_entropy_with_logits(model(images), truth.float()))
            optimizer.step()
        measures = evaluate(accelerator, model, test_loader)
        accelerator.print(epoch, measures)
        accelerator.save_state(f"checkpoints/epoch_{epoch}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    return measures


if __name__ == "__main__":
    main(Settings(), 2)
