"""The language model as a user of Lightning trains it; the schedule is imported, as from transformers."""

from typing import Any

import torch
from charlm.recipe import CharLM, Transformer
from charlm.settings import Settings
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

from flyte_ddp.schedules import cosine


class CharModule(LightningModule):
    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings
        self.model = Transformer(settings.width, settings.layers, settings.dropout)
        self.loss, self.perplexity = MeanMetric(), Perplexity(ignore_index=0)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        text = batch[0]
        return F.cross_entropy(self.model(text[:, :-1]).mT, text[:, 1:], ignore_index=0)

    def validation_step(self, batch: list[Tensor]) -> None:
        text, target = batch[0][:, :-1], batch[0][:, 1:]
        logits = self.model(text)
        self.loss.update(F.cross_entropy(logits.mT, target, ignore_index=0), (target != 0).sum())
        self.perplexity.update(logits, target)
        self.log_dict({"loss": self.loss, "perplexity": self.perplexity}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        hp, weights = self.settings, list(self.parameters())
        groups = [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": hp.weight_decay},
            {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0},
        ]
        optimizer = torch.optim.AdamW(groups, hp.learning_rate, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = LambdaLR(optimizer, lambda step: cosine(step, steps, warmup_fraction=0.1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(settings: Settings, ranks: int) -> dict[str, float]:
    seed_everything(settings.seed)
    train, test = (TensorDataset(CharLM(settings).data(split)) for split in ("train", "test"))
    module = CharModule(settings)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto",
        max_epochs=settings.epochs,
        gradient_clip_val=1.0,
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
