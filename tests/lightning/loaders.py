# mypy: ignore-errors
"""Data for the module of docs/lightning.md, beside whose numerals/model.py this file is put."""

import multiprocessing
import os
import random

import numpy as np
import torch
from lightning import LightningDataModule
from numerals.model import Numerals
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


class WithoutTraining(LightningDataModule): ...


class Batches(Sampler):
    def __len__(self):
        return 10

    def __iter__(self):
        yield from ([number] * 4 for number in range(10))


class OwnBatches(Numerals):
    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_sampler=Batches())


class WithoutTest(Numerals):
    test_dataloader = LightningDataModule.test_dataloader


class Numbered(Dataset):
    """Has a file open under two numbers, which share their offset until a forked worker opens each anew."""

    def __init__(self):
        self.file = open(__file__, "rb", buffering=0)  # noqa: SIM115
        self.same = os.fdopen(os.dup(self.file.fileno()), "rb", buffering=0)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        is_apart = self.file.seek(1 + index) != self.same.seek(0, os.SEEK_CUR)
        return index, torch.rand(64), multiprocessing.get_start_method() == "fork", is_apart


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
