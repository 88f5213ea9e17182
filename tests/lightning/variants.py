# mypy: ignore-errors
"""Variants of the project of docs/lightning.md, beside whose numerals/model.py this file is put."""

import json
import multiprocessing
import random
from pathlib import Path

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from numerals.model import LitNumerals, Numerals
from torch import distributed
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    random_split,
)


class Loader:
    """Goes on within an epoch."""

    def __init__(self, trainer, samples, batch_size):
        sampler = DistributedSampler(samples, trainer.world_size, trainer.global_rank)
        self.loader, self.trainer = DataLoader(samples, batch_size, sampler=sampler), trainer

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.loader.sampler.set_epoch(self.trainer.current_epoch)
        first = self.trainer.fit_loop.epoch_loop.batch_idx + 1
        yield from (batch for step, batch in enumerate(self.loader) if step >= first)

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict): ...


class Resumable(Numerals):
    def train_dataloader(self):
        return Loader(self.trainer, self.parts[0], self.batch_size)


class Drawn(Numerals):
    """Draws its splits from torch's own generator, and so anew for the test."""

    def setup(self, stage):
        super().setup(stage)
        self.parts = random_split(self.parts[0].dataset, (0.7, 0.15, 0.15))
        self.tested = getattr(self, "tested", self.parts[2].indices)
        assert self.tested == self.parts[2].indices, stage


class Stopping(LitNumerals):
    def configure_callbacks(self):
        return [EarlyStopping("val_loss", patience=1, min_delta=100)]


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.rand(64), 1


class WithoutLength(Numerals):
    def train_dataloader(self):
        return DataLoader(Endless(), self.batch_size)


class WithoutValidation(Numerals):
    def val_dataloader(self):
        return DataLoader([])


class WithoutBatches(Numerals):
    """Fewer samples than a batch, of which only whole ones are taken."""

    def train_dataloader(self):
        return DataLoader(self.parts[0], 10_000, drop_last=True)


class Depth(LitNumerals):
    def __init__(self, width, learning_rate, depth): ...


class WithoutTraining(LightningDataModule): ...


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


class Batches(Sampler):
    def __len__(self):
        return 10

    def __iter__(self):
        yield from ([number] * 4 for number in range(10))


class OwnBatches(Numerals):
    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_sampler=Batches())


class TwoOptimizers(LitNumerals):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.network[0].parameters(), 0.1), torch.optim.SGD(self.network[3].parameters(), 0.1)]


class WithoutTest(Numerals):
    test_dataloader = LightningDataModule.test_dataloader


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


class Scaled(LitNumerals):
    def __init__(self, width, lr=3e-3):
        super().__init__(width, lr)


class Numbered(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index, torch.rand(64), multiprocessing.get_start_method() == "fork"


class Mixed(Sampler):
    """Draws each index when it is asked for, from one source of random numbers after the other."""

    def __init__(self, samples):
        self.left = samples.indices

    def __len__(self):
        return len(self.left)

    def __iter__(self):
        left = list(self.left)
        for draw in (np.random.randint, random.randrange, lambda n: int(torch.randint(n, ()))) * 10:
            yield left.pop(draw(len(left)))


class InTwo(LightningDataModule):
    """Each split is drawn when its loader is made; two of them are for validation."""

    def __init__(self, width, learning_rate, batch_size):
        super().__init__()

    def train_dataloader(self):
        samples = Numbered()
        return DataLoader(samples, 3, sampler=Mixed(random_split(samples, [30, 10])[0]), num_workers=1)

    def val_dataloader(self):
        return [DataLoader(part, 4) for part in random_split(Numbered(), [24, 16])]


class Sampled(InTwo):
    """Lightning deals out what a sampler of its user draws; a shuffled order is Lightning's own."""

    def train_dataloader(self):
        return DataLoader(Numbered(), 3, sampler=WeightedRandomSampler([1.0] * 20 + [0.0] * 20, 60))


class Shuffled(InTwo):
    def train_dataloader(self):
        return DataLoader(Numbered(), 3, shuffle=True, num_workers=1)


class Ignored(Numerals):
    def train_dataloader(self):
        return DataLoader(self.parts[0], 3, sampler=RandomSampler(self.parts[0], True, 60))


class Unshared(IterableDataset):
    """Leaves it to others to share it out."""

    def __iter__(self):
        yield from (Numbered()[index] for index in range(40))


class ForEachRank(InTwo):
    def train_dataloader(self):
        return DataLoader(Unshared(), 4)


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
        return self.layer(batch[1]).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.note(f"validation {dataloader_idx}", batch)
        self.log("val_loss", 1.0)

    def on_fit_end(self):
        Path(self.trainer.default_root_dir, f"seen-{self.global_rank}").write_text(json.dumps(self.seen))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
