"""The sentences as a user of Lightning trains on them; order and schedule are imported."""

from functools import partial
from typing import Any

import torch
from finetune_text.recipe import CHAPTERS, Sentences
from finetune_text.settings import Settings
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForSequenceClassification

from benchmarks.trainers.same_order import SameOrder
from flyte_ddp.schedules import cosine


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = {name: pad_sequence([row[name] for row, _ in rows], batch_first=True) for name in rows[0][0]}
    return {**batch, "labels": torch.tensor([label for _, label in rows])}


class SentencesModule(LightningModule):
    def __init__(self, settings: Settings):
        super().__init__()
        self.settings, kind = settings, AutoModelForSequenceClassification
        # Lightning leaves it in evaluation mode, in which from_pretrained returns it
        self.model = kind.from_pretrained("encoder", num_labels=len(CHAPTERS), dtype=torch.float32).train()
        self.loss, self.accuracy = MeanMetric(), MulticlassAccuracy(len(CHAPTERS), average="micro")

    def train_dataloader(self) -> DataLoader:
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        order, size = SameOrder(self.settings, rank, ranks), self.settings.batch_size // ranks
        return DataLoader(Sentences("train"), size, sampler=order, collate_fn=padded)

    def training_step(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def validation_step(self, batch: Any) -> None:
        outputs = self.model(**batch)
        self.loss.update(outputs.loss, len(batch["labels"]))
        self.accuracy.update(outputs.logits, batch["labels"])
        self.log_dict({"loss": self.loss, "accuracy": self.accuracy}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.settings.learning_rate, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = LambdaLR(optimizer, partial(cosine, steps=steps, warmup_fraction=0.1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(settings: Settings, ranks: int) -> dict[str, float]:
    seed_everything(settings.seed)
    module, test_batch_size = SentencesModule(settings), settings.test_batch_size // ranks
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
        module, val_dataloaders=DataLoader(Sentences("test"), test_batch_size, collate_fn=padded), ckpt_path="last"
    )
    if trainer.is_global_zero:
        torch.save(module.model.state_dict(), "model.pt")
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    main(Settings(), 2)
