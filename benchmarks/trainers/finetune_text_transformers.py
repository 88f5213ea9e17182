"""The sentences as a user of transformers' Trainer trains on them; order and schedule are imported."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from finetune_text.recipe import CHAPTERS, Sentences
from finetune_text.settings import Settings
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments, set_seed

from benchmarks.trainers.same_order import SameOrder
from flyte_ddp.schedules import cosine


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = {name: pad_sequence([row[name] for row, _ in rows], batch_first=True) for name in rows[0][0]}
    return {**batch, "labels": torch.tensor([label for _, label in rows])}


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


class OrderedTrainer(Trainer):
    order: SameOrder
    train_dataset: Sentences

    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_dataset, self.args.train_batch_size, sampler=self.order, collate_fn=padded)
        return self.accelerator.prepare(loader)


def main(settings: Settings, ranks: int) -> dict[str, float]:
    """ranks: which torchrun has started."""
    arguments = TrainingArguments(
        "checkpoints",
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.test_batch_size,
        accelerator_config={"split_batches": True},  # these sizes are those of all ranks
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=settings.log_interval,
        average_tokens_across_devices=False,  # else the mean that BERT's loss is would count twice on two ranks
        max_grad_norm=1.0,
        seed=settings.seed,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(settings.seed)
    kind, train = AutoModelForSequenceClassification, Sentences("train")
    model = kind.from_pretrained("encoder", num_labels=len(CHAPTERS), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, fused=True)
    steps = settings.epochs * math.ceil(len(train) / settings.batch_size)
    schedule = LambdaLR(optimizer, partial(cosine, steps=steps, warmup_fraction=0.1))
    trainer = OrderedTrainer(
        model,
        arguments,
        data_collator=padded,
        train_dataset=train,
        eval_dataset=Sentences("test"),
        compute_metrics=accuracy,
        optimizers=(optimizer, schedule),
    )
    trainer.order = SameOrder(settings)
    trainer.train(resume_from_checkpoint=any(Path().glob("checkpoints/checkpoint-*")))
    if trainer.is_world_process_zero():
        torch.save(model.state_dict(), "model.pt")
    measures = trainer.evaluate()
    return {"loss": measures["eval_loss"], "accuracy": measures["eval_accuracy"]}


if __name__ == "__main__":
    main(Settings(), 2)
