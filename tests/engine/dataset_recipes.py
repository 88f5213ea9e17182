"""Recipes whose data are wrong, or only look it."""

import multiprocessing
import threading
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.engine.probe_recipes import SIZE, WIDTH, Sound, table


class Rows(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return table()[index]


class NoisyRows(Rows):
    def __getitem__(self, index):
        return table()[index] + np.random.normal(size=WIDTH).astype(np.float32)


class RarelyNoisyRows(Rows):
    """The few samples that are looked at may all come out the same: the state of the random numbers gives it away."""

    def __getitem__(self, index):
        return table()[index] * (1 if np.random.random() < 0.999 else -1)


class SeededRows(Rows):
    """Noise that is the same each time."""

    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.from_numpy(table()[index]) + torch.randn(WIDTH)


class Empty(Rows):
    def __len__(self):
        return 0


class NoisyDataset(Sound):
    dataset: Any = NoisyRows

    def data(self, split):
        return self.dataset()


class RarelyNoisyDataset(NoisyDataset):
    dataset = RarelyNoisyRows


class SeededDataset(NoisyDataset):
    dataset = SeededRows


class EmptyDataset(NoisyDataset):
    dataset = Empty


class Unseeded(Sound):
    def data(self, split):
        return torch.from_numpy(table() if split == "train" else np.random.default_rng().permutation(table()))


class NotANumber(Sound):
    def data(self, split):
        rows = table()
        rows[5, 3] = np.nan
        return torch.from_numpy(rows)


class Lengths(Sound):
    def data(self, split):
        return torch.from_numpy(table()), torch.arange(SIZE + 1)


def wait(ready):
    ready.set()
    threading.Event().wait()


class Chatty(Sound):
    """Leaves a thread and a process behind."""

    def data(self, split):
        print("a word on standard output", flush=True)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        with multiprocessing.Pool(1) as pool:
            assert pool.map(abs, [-1]) == [1]
        context = multiprocessing.get_context("fork")
        for _ in range(2):
            ready = context.Event()
            child = context.Process(target=wait, args=(ready,))
            child.start()
            ready.wait()
            print("child", child.pid, flush=True)
        child.terminate()
        child.join()  # as the end of a pool does, which asks its processes by SIGTERM to end
        # settings.seed decides numpy's random numbers, too, outside of steps
        return torch.from_numpy(np.random.permutation(table()))
