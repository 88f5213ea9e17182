"""The language model as a user of Accelerate trains it; the schedule is imported, as from transformers."""

import math
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from charlm.recipe import CharLM, Transformer
from charlm.settings import Settings
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from flyte_ddp.schedules import cosine


@torch.inference_mode()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    model.eval()
    total = characters = 0.0
    for (text,) in loader:
        target = text[:, 1:]
        losses = F.cross_entropy(model(text[:, :-1]).mT, target, reduction="none", ignore_index=0).sum(1)
        losses, counts = accelerator.gather_for_metrics((losses, (target != 0).sum(1)))
        total += float(losses.sum())
        characters += float(counts.sum())
    return {"loss": total / characters, "perplexity": math.exp(total / characters)}


def main(settings: Settings, ranks: int) -> dict[str, float]:
    """ranks: which torchrun has started."""
    # One batch shared out, in an order that a resumed epoch has again
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    set_seed(settings.seed)
    train, test = (TensorDataset(CharLM(settings).data(split)) for split in ("train", "test"))
    train_loader = DataLoader(train, settings.batch_size, shuffle=True)
    test_loader = DataLoader(test, settings.test_batch_size)
    model = Transformer(settings.width, settings.layers, settings.dropout)
    weights = list(model.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, settings.learning_rate, fused=True)
    steps = settings.epochs * len(train_loader)
    schedule = LambdaLR(optimizer, lambda step: cosine(step, steps, warmup_fraction=0.1))
    model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, test_loader, schedule
    )
    first_epoch = len(list(Path().glob("checkpoints/epoch_*")))
    if first_epoch:
        accelerator.load_state(f"checkpoints/epoch_{first_epoch - 1}")
    for epoch in range(first_epoch, settings.epochs):
        model.train()
        train_loader.set_epoch(epoch)
        for (text,) in train_loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(text[:, :-1]).mT, text[:, 1:], ignore_index=0))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        measures = evaluate(accelerator, model, test_loader)
        accelerator.print(epoch, measures)
        accelerator.save_state(f"checkpoints/epoch_{epoch}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    return measures


if __name__ == "__main__":
    main(Settings(), 2)
