# mypy: ignore-errors
"""Data for the module of docs/lightning.md, beside whose numerals/model.py this file is put."""

import multiprocessing
import os
import random
from types import MappingProxyType

import numpy as np
import torch
from lightning import LightningDataModule
from numerals.model import Numerals
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
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
    """Draws its splits from torch's own generator, and so anew for the test; rank 0 alone makes what they are of."""

    def prepare_data(self):
        vars(self).setdefault("made", (torch.rand(3), np.random.rand(), random.random()))

    def setup(self, stage):
        super().setup(stage)
        self.parts = random_split(self.parts[0].dataset, (0.7, 0.15, 0.15))
        of_ranks = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(of_ranks, self.parts[2].indices)
        assert of_ranks == [self.parts[2].indices] * len(of_ranks), stage
        self.tested = getattr(self, "tested", self.parts[2].indices)
        assert self.tested == self.parts[2].indices, stage


class Weighed(Dataset):
    """Samples times a factor that the module sets."""

    def __init__(self, samples):
        self.samples, self.factor = samples, 1.0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, label = self.samples[index]
        return inputs * self.factor, label


class Paced(Numerals):
    """A loader worker copies the Dataset when it begins."""

    def train_dataloader(self):
        return DataLoader(Weighed(self.parts[0]), self.batch_size, shuffle=True, num_workers=1)


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


class Augmented(Dataset):
    """Draws from each generator that there is."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.rand(64) + np.random.rand() + random.random()
        return noise * (1 + (index + self.first) % 7), (index + self.first) % 10


def mixed(samples):
    """Draws for the whole batch."""
    inputs, labels = default_collate(samples)
    return inputs * torch.rand(()), labels


class Plain(LightningDataModule):
    """A plain DataLoader of several workers; 52 samples are 7 batches of 4 on two ranks, the last one smaller."""

    own = MappingProxyType({})

    def __init__(self, width, learning_rate, batch_size):
        super().__init__()

    def train_dataloader(self):
        return DataLoader(Augmented(52), **{"batch_size": 4, "shuffle": True, "num_workers": 2, **self.own})


class Persistent(Plain):
    own = MappingProxyType({"persistent_workers": True, "drop_last": True, "collate_fn": mixed, "num_workers": 3})


class Generated(Plain):
    """Generators of its own give the orders."""

    def train_dataloader(self):
        order = WeightedRandomSampler([1.0] * 52, 52, generator=torch.Generator().manual_seed(5))
        shuffled = DataLoader(Augmented(52), 4, shuffle=True, generator=torch.Generator().manual_seed(6))
        return [DataLoader(Augmented(52), 4, sampler=order, num_workers=1), shuffled]


class Buckets(BatchSampler):
    """Draws the size of each batch when it is asked for."""

    def __iter__(self):
        left = list(self.sampler)
        while left:
            count = random.randint(3, 6)
            yield [left.pop() for _ in range(min(count, len(left)))]


class Bucketed(Plain):
    def train_dataloader(self):
        samples = Augmented(90)
        return DataLoader(samples, batch_sampler=Buckets(RandomSampler(samples), 4, False), num_workers=2)


def lonely(sample):
    return sample[0][None], torch.tensor([sample[1]])


class Cycled(Plain):
    """The second loader begins anew within the epoch. A batch of the third one is a sample of the Dataset."""

    def train_dataloader(self):
        rest = {"shuffle": True, "num_workers": 1}
        one_by_one = DataLoader(Augmented(14, 200), None, num_workers=2, collate_fn=lonely)
        return {
            "a": DataLoader(Augmented(52), 4, **rest),
            "b": DataLoader(Augmented(9, 100), 2, **rest),
            "c": one_by_one,
        }


class Streamed(Plain):
    """Has no state, and tells its length."""

    def train_dataloader(self):
        return DataLoader(Stream(), 4, num_workers=1)


class Ahead(DataLoader):
    """Iterates by itself."""

    def __iter__(self):
        yield from [*super().__iter__()]


class ReadAhead(Plain):
    def train_dataloader(self):
        return Ahead(Augmented(28), 4)


class Stream(IterableDataset):
    def __len__(self):
        return 28

    def __iter__(self):
        yield from (Augmented(28)[index] for index in range(28))


class Secret(Sampler):
    """Draws from a generator of NumPy's that nobody else knows."""

    def __init__(self, count):
        self.count, self.rng = count, np.random.default_rng(0)

    def __len__(self):
        return self.count

    def __iter__(self):
        yield from self.rng.permutation(self.count).tolist()


class Secretive(Plain):
    def train_dataloader(self):
        return DataLoader(Augmented(52), 4, sampler=Secret(52))


class Holding(Augmented):
    def __init__(self, count):
        super().__init__(count)
        self.rng = np.random.default_rng(0)


class Keeping(Plain):
    def train_dataloader(self):
        return DataLoader(Holding(52), 4)


class Evaluated(Numerals):
    """Has many batches to evaluate."""

    def val_dataloader(self):
        return DataLoader(self.parts[1], 10)

    def test_dataloader(self):
        return DataLoader(self.parts[2], 10)
