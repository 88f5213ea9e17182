"""Our recipe as a careful user of Lightning writes it, on one rank per GPU, or on two ranks without GPUs.

Network, initial weights, loss, clipping, optimizer, schedule, global batch and precision are ours; data loading
(normalised tensors in memory, TensorDataset, DataLoader, DistributedSampler), the loop and DDP are Lightning's, with
logger, checkpoints and progress bar switched off. `python -m benchmarks.lightning_mnist --seed 1` prints what train
returns.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.stopwatch import clock
from flyte_ddp.data.prepared.prepared import open_split, read_description
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.engine.set_up import choose_precision
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.recipes.models import Shape, build_model


class MnistModule(LightningModule):
    def __init__(self, hp: Hyperparameters, image_shape: Shape) -> None:
        super().__init__()
        self.hp = hp
        model = build_model(hp.model, hp.seed, image_shape, 10)
        self.model = model.to(memory_format=torch.channels_last)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        scores = self.model(images.contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(scores, labels, label_smoothing=self.hp.label_smoothing)

    def configure_optimizers(self) -> Any:
        hp, steps = self.hp, int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(
            self.parameters(), hp.learning_rate, hp.sgd_momentum,
            nesterov=hp.nesterov, weight_decay=hp.weight_decay, fused=True,
        )  # fmt: skip
        schedule = OneCycleLR(
            optimizer, hp.learning_rate, steps, pct_start=hp.warmup_fraction, anneal_strategy="linear",
            cycle_momentum=False, div_factor=10, final_div_factor=100,
        )  # fmt: skip
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_epoch_start(self) -> None:
        self.started = clock(self.device)

    def on_train_epoch_end(self) -> None:
        self.log("seconds", clock(self.device) - self.started)  # the way back to the parent process


def tensors(data: Path, split: str) -> TensorDataset:
    """The split in memory: images (N, 1, 28, 28) float32, normalised; labels (N,) int64."""
    description = read_description(data)
    images, labels = (torch.from_numpy(array) for array in open_split(data, split))
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (description.mean, description.std))
    return TensorDataset((images / 255 - mean) / std, labels.long())


def train(seed: int) -> dict[str, float]:
    """Trains one epoch; returns seconds of the loop alone, and the accuracy on exactly the test images."""
    hp = Hyperparameters(epochs=1, seed=seed)
    seed_everything(seed)
    data = prepare("mnist")
    module = MnistModule(hp, read_description(data).image_shape)
    world = choose_world(hp.backend, 0, hp.batch_size)
    precision = choose_precision(hp.precision, torch.device(world.device))
    trainer = Trainer(
        accelerator="gpu" if world.device == "cuda" else "cpu",
        devices=world.size,
        strategy=DDPStrategy(process_group_backend=world.backend, start_method="spawn", gradient_as_bucket_view=True),
        precision="bf16-mixed" if precision == "bfloat16" else "32-true",
        max_epochs=hp.epochs,
        gradient_clip_val=hp.clip_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch_size, pin_memory = hp.batch_size // world.size, world.device == "cuda"
    trainer.fit(module, DataLoader(tensors(data, "train"), batch_size, shuffle=True, pin_memory=pin_memory))
    images, labels = tensors(data, "test").tensors
    with torch.inference_mode():
        accuracy = (module.model.cpu().eval()(images).argmax(1) == labels).double().mean()
    return {"seconds": float(trainer.callback_metrics["seconds"]), "accuracy": float(accuracy)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(train(parser.parse_args().seed)))
