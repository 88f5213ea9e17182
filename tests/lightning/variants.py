# mypy: ignore-errors
"""Variants of the module of docs/lightning.md, beside whose numerals/model.py this file is put."""

import json
import os
import random
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from numerals.model import LitNumerals
from torch import distributed
from torchmetrics.classification import MulticlassAccuracy


class Stopping(LitNumerals):
    def configure_callbacks(self):
        return [EarlyStopping("val_loss", patience=1, min_delta=100)]


def of_trainer(epochs):
    return [EarlyStopping("val_loss", patience=epochs - 8, min_delta=100), TQDMProgressBar()]


def pruning():
    return [ModelPruning("l1_unstructured", amount=0.2)]


def a_name():
    return ["EarlyStopping"]


class Hurried(LitNumerals):
    """Ends its first epoch after 15 steps, and the training after 5 of the second, as a Timer does."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 15 else None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = self.global_step == 20


class Depth(LitNumerals):
    def __init__(self, width, learning_rate, depth): ...


class WithoutOptimizer(LitNumerals):
    configure_optimizers = LightningModule.configure_optimizers


class Failing(LitNumerals):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and distributed.get_rank() == 1:
            raise KeyError("no such label")
        return super().training_step(batch, batch_idx)


class Diverging(LitNumerals):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (torch.nan if batch_idx == 12 else 1)


class Broken(LitNumerals):
    """Its own optimization destroys the weights in a step and then returns early, as a guard would."""

    def __init__(self, width, learning_rate):
        super().__init__(width, learning_rate)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.measured(batch, "train")
        if not loss.isfinite():
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss * (torch.nan if batch_idx == 12 else 1))
        optimizer.step()


class BrokenInValidation(LitNumerals):
    def validation_step(self, batch, batch_idx):
        super().validation_step((batch[0] * torch.nan, batch[1]), batch_idx)


class BrokenInTest(LitNumerals):
    def measured(self, batch, split):
        return super().measured((batch[0] * (torch.nan if split == "test" else 1), batch[1]), split)


class Averaging(LitNumerals):
    """Lightning adds an epoch for the statistics of the averaged weights."""

    def __init__(self, width, learning_rate):
        super().__init__(width, learning_rate)
        self.network.insert(1, torch.nn.BatchNorm1d(width))

    def configure_callbacks(self):
        return [StochasticWeightAveraging(1e-3, 1)]


class Accumulating(LitNumerals):
    def configure_callbacks(self):
        return [GradientAccumulationScheduler({0: 3})]


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.network[:2], train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.network[:2], optimizer, 1e-3)


class Searching(LitNumerals):
    def configure_callbacks(self):
        return [LearningRateFinder()]


class Spiking(LitNumerals):
    def configure_callbacks(self):
        return [SpikeDetection()]


class FineTuned(Averaging):
    def configure_callbacks(self):
        return [Unfreezing()]

    def configure_optimizers(self):
        return torch.optim.Adam([weight for weight in self.parameters() if weight.requires_grad], 1e-2)


class Keeping(LitNumerals):
    def configure_callbacks(self):
        return [ModelCheckpoint(self.trainer.default_root_dir, "best", monitor="val_loss")]


class KeepingFirst(LitNumerals):
    """The loss is the highest after the first epoch."""

    def configure_callbacks(self):
        folder = Path(self.trainer.default_root_dir, "kept")
        return [ModelCheckpoint(folder, "{epoch}", "val_loss", mode="max", save_on_train_epoch_end=True)]


class History(Callback):
    def state_dict(self):
        return {"losses": np.array([])}


class Remembering(LitNumerals):
    def configure_callbacks(self):
        return [History()]


class OneCycle(LitNumerals):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PartlyUnused(LitNumerals):
    def __init__(self, width, learning_rate):
        super().__init__(width, learning_rate)
        self.unused = torch.nn.Linear(1, 1)


class TwoOptimizers(LitNumerals):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.network[0].parameters(), 0.1), torch.optim.SGD(self.network[3].parameters(), 0.1)]


class ByHand(LitNumerals):
    """Its own optimization, without a loss that anyone could see, and no validation."""

    def __init__(self, width, learning_rate):
        super().__init__(width, learning_rate)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.measured(batch, "train"))
        optimizer.step()

    validation_step = LightningModule.validation_step


class OfAllLoaders(LitNumerals):
    """Averages its weights once a step is done, and draws meanwhile."""

    def __init__(self, width, learning_rate):
        super().__init__(width, learning_rate)
        self.register_buffer("average", torch.zeros(10))
        self.right = MulticlassAccuracy(10, average="micro")

    def on_train_epoch_start(self):
        self.right.reset()

    def training_step(self, batch, batch_idx):
        parts = [*batch.values()] if isinstance(batch, dict) else batch if isinstance(batch[0], list) else [batch]
        inputs, labels = parts[-1]
        self.right(self.network(inputs), labels)
        self.log("train_right", self.right, on_step=False, on_epoch=True)
        self.log("train_most", inputs.max(), on_step=False, on_epoch=True, reduce_fx="max")
        return sum(self.measured(part, "train") * (1 + number) for number, part in enumerate(parts))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.lerp_(self.network[-1].bias.detach(), float(torch.rand(())))
        self.log("train_average", self.average.mean(), on_step=True, on_epoch=True)


class Counting(Callback):
    """Counts epochs, which its state has, and draws what the module needs in one."""

    def __init__(self):
        self.epochs = 0

    def on_train_epoch_start(self, trainer, module):
        self.epochs += 1
        module.factor = 1 / (1 + trainer.current_epoch) + 0.1 * random.random()

    def on_train_epoch_end(self, trainer, module):
        module.log("train_epochs", float(self.epochs))

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def counting():
    return [Counting()]


class EachEpoch(LitNumerals):
    """Sets up each epoch: what it needs is in no checkpoint, and a hook changes weights."""

    def on_train_epoch_start(self):
        self.shift = torch.rand(())
        self.log("train_shift", self.shift)
        with torch.no_grad():
            self.network[0].weight.mul_(0.9)

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0] + self.shift, batch[1]], batch_idx) * self.factor


class Decaying(LitNumerals):
    """Sets the rate of each epoch by hand, and changes no tensor."""

    def on_train_epoch_start(self):
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class Started(LitNumerals):
    """Begins an average of its weights when training starts, and sets the data of an epoch when that starts."""

    def __init__(self, width, learning_rate):
        super().__init__(width, learning_rate)
        self.average = torch.nn.Linear(64, width).requires_grad_(False)

    def on_train_start(self):
        self.average.load_state_dict(self.network[0].state_dict())

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.factor = 1 / (1 + self.current_epoch)

    def training_step(self, batch, batch_idx):
        away = (self.network[0](batch[0]) - self.average(batch[0])).square().mean()
        return super().training_step(batch, batch_idx) * self.factor + away

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for weight, average in zip(self.network[0].parameters(), self.average.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["average"] = checkpoint["state_dict"].pop("average.bias")

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["average.bias"] = checkpoint["average"]


def beginning():
    def begin(trainer, module):
        module.factor = 1 / (1 + trainer.current_epoch)

    return [LambdaCallback(on_train_epoch_start=begin)]


def averaging():
    return [EMAWeightAveraging(decay=0.9)]


class Noticed(LitNumerals):
    """Is asked to stop in the phase that NUMERALS_NOTICE names, on one of its ranks alone."""

    def reach(self, phase):
        seen = vars(self).setdefault("seen", {})
        seen[phase] = seen.get(phase, 0) + 1
        is_last = self.global_rank == self.trainer.world_size - 1
        if is_last and os.environ.get("NUMERALS_NOTICE") == f"{phase} {seen[phase]}":
            if "DDP_TEST_SENT" in os.environ:
                Path(os.environ["DDP_TEST_SENT"]).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch, batch_idx):
        self.reach("step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.reach("validation")
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.reach("test")
        return super().test_step(batch, batch_idx)


class Judged(Noticed):
    """Whose end of an epoch needs what steps have logged in all ways there are."""

    def __init__(self, width: int, learning_rate: float):
        super().__init__(width, learning_rate)
        self.accuracies = torch.nn.ModuleList([MulticlassAccuracy(10), MulticlassAccuracy(10)])

    def measured(self, batch, split):
        loss = super().measured(batch, split)
        accuracy = self.accuracies[0 if split == "train" else 1]
        accuracy(self.network(batch[0]), batch[1])
        self.log(f"{split}_right", accuracy, on_step=False, on_epoch=True)
        if split == "train":
            self.log("forked_loss", loss, on_step=True, on_epoch=True)
            self.log("most_loss", loss, on_step=False, on_epoch=True, reduce_fx="max")
            self.log("step_loss", loss)
        return loss

    def configure_callbacks(self):
        watched = "train_loss", "train_right", "forked_loss_epoch", "most_loss", "step_loss"
        return [EarlyStopping(name, patience=9, check_on_train_epoch_end=True) for name in watched]


class Listing(Noticed):
    """Reads at the end of an epoch what its steps have left in the module."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        vars(self).setdefault("losses", []).append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        torch.stack(self.losses).mean()
        self.losses.clear()


class Swapping(Noticed):
    """Evaluates an average of its weights, which takes their place for as long."""

    def on_validation_start(self):
        self.own = {name: value.clone() for name, value in self.network.state_dict().items()}
        with torch.no_grad():
            for weight in self.network.parameters():
                weight.mul_(0.5)

    def on_validation_end(self):
        self.network.load_state_dict(self.own)


class Ending(Noticed):
    """Changes its weights when training has ended, once they are an average, by what is set when training starts."""

    def on_train_start(self):
        self.factor = 0.5

    def on_train_end(self):
        with torch.no_grad():
            for weight in self.network.parameters():
                weight.mul_(self.factor)

    def configure_callbacks(self):
        return averaging()


class EndingSmoothed(Ending):
    def configure_callbacks(self):
        return [StochasticWeightAveraging(1e-3, 1)]


class EndingNormalized(EndingSmoothed):
    """Has an epoch more, for the statistics of the averaged weights, and draws in the test."""

    def __init__(self, width: int, learning_rate: float):
        super().__init__(width, learning_rate)
        self.network.insert(1, torch.nn.BatchNorm1d(width))

    def test_step(self, batch, batch_idx):
        super().test_step((batch[0] + torch.rand(()), batch[1]), batch_idx)


class AddingUp(Broken):
    """Its own optimization adds up the gradients of two batches, those of the first on each rank by itself or not."""

    is_apart = False

    def training_step(self, batch, batch_idx):
        optimizer, is_first = self.optimizers(), batch_idx % 2 == 0
        loss = self.measured(batch, "train")
        is_apart = self.is_apart and is_first and self.trainer.world_size > 1
        with self.trainer.model.no_sync() if is_apart else nullcontext():
            self.manual_backward(loss / 2)
        if not is_first:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class AddingUpApart(AddingUp):
    is_apart = True


class OfEachSample(Broken):
    """Its own optimization returns the loss of each sample."""

    def training_step(self, batch, batch_idx):
        losses = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(losses.mean())
        optimizer.step()
        return losses


class Scaled(LitNumerals):
    def __init__(self, width, lr=3e-3):
        super().__init__(width, lr)


class Seen(LightningModule):
    """Writes down which samples its rank sees, and what it draws in a step."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(64, 1), []

    def note(self, split, batch):
        self.seen.append([split, self.current_epoch, batch[0].tolist(), float(torch.rand(()))])

    def training_step(self, batch, batch_idx):
        self.note("train", batch)
        self.log("forked", batch[2].float().mean())
        self.log("apart", batch[3].float().mean())
        return self.layer(batch[1]).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.note(f"validation {dataloader_idx}", batch)
        self.log("val_loss", 1.0)

    def on_fit_end(self):
        Path(self.trainer.default_root_dir, f"seen-{self.global_rank}").write_text(json.dumps(self.seen))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
