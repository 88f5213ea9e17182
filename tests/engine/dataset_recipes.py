"""Recipes whose data are wrong, or only look it."""

import io
import multiprocessing
import random
import sqlite3
import tarfile
import tempfile
import threading
import zipfile
from pathlib import Path
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


class OwnGenerator(Rows):
    """The few samples that are looked at may all come out the same: the state of the random numbers gives it away."""

    def __init__(self):
        self.steps = [{"rng": np.random.default_rng()}]

    def __getitem__(self, index):
        return table()[index] * (1 if self.steps[0]["rng"].random() < 0.999 else -1)


class OwnTransform(Rows):
    """Has what albumentations' transforms have, with other generators behind it."""

    def __init__(self):
        self.transform = Jitter()

    def __getitem__(self, index):
        return table()[index] + self.transform.python.random() + self.transform.torch_draw()


class Jitter:
    def __init__(self):
        self.python, self.generator = random.Random(3), torch.Generator().manual_seed(3)

    def set_random_seed(self, seed):
        self.python.seed(seed)
        self.generator.manual_seed(seed)

    def torch_draw(self):
        return torch.rand(WIDTH, generator=self.generator).numpy()


class OwnTransformSeeded(OwnTransform):
    """Does what the message says."""

    def __getitem__(self, index):
        self.transform.set_random_seed(torch.randint(2**31, ()).item())
        return super().__getitem__(index)


class OwnGeneratorSeeded(OwnGenerator):
    """Does what the message says."""

    def __getitem__(self, index):
        self.steps[0]["rng"] = np.random.default_rng(int(torch.randint(2**31, ())))
        return super().__getitem__(index)


class FreshGenerator(Rows):
    def __getitem__(self, index):
        return table()[index] + np.random.default_rng().normal(size=WIDTH).astype(np.float32)


class NoisyReader(Rows):
    """Draws once in a thousand batches, for whatever is read together."""

    def read_batch(self, indices):
        return table()[indices] * (1 if np.random.random() < 0.999 else -1)


class SeededRows(Rows):
    """Noise that is the same each time."""

    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.from_numpy(table()[index]) + torch.randn(WIDTH)


class KeptNoise(Rows):
    """Draws once, as the first sample is read."""

    noise: Any = None

    def __getitem__(self, index):
        self.noise = np.random.normal(size=WIDTH).astype(np.float32) if self.noise is None else self.noise
        return table()[index] + self.noise


class KeptSamples(NoisyRows):
    def __init__(self):
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class Ascending(Rows):
    """Goes on from the sample before, as long as indices rise, and begins anew where they don't."""

    last, shift = len(table()), 0.0

    def __getitem__(self, index):
        self.shift = self.shift + 1 if index > self.last else 0.0
        self.last = index
        return table()[index] + np.float32(self.shift)


class OpenFile(Rows):
    """Reads from what it has opened at the start."""

    mode = "rb"

    def __init__(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows")
            path.write_bytes(table().tobytes())
            self.file = open(path, self.mode)  # noqa: SIM115
            self.opened = [self.file, *self.open_others(Path(folder))]

    def __del__(self):
        for file in self.opened:
            file.close()

    def open_others(self, folder):
        return []

    def __getitem__(self, index):
        self.file.seek(index * WIDTH * 4)
        return np.frombuffer(self.file.read(WIDTH * 4), np.float32)


class WritableFile(OpenFile):
    mode = "r+b"


class OpenFiles(OpenFile):
    def open_others(self, folder):
        with zipfile.ZipFile(folder / "zip", "w") as archive, tarfile.open(folder / "tar", "w") as tar:
            for index, row in enumerate(table()):
                archive.writestr(f"{index}", row.tobytes())
                entry = tarfile.TarInfo(f"{index}")
                entry.size = row.nbytes
                tar.addfile(entry, io.BytesIO(row.tobytes()))
        self.zip, self.tar = zipfile.ZipFile(folder / "zip"), tarfile.open(folder / "tar")  # noqa: SIM115
        self.base = sqlite3.connect(folder / "base")
        self.base.execute("create table rows (number integer primary key, row blob)")
        self.base.executemany("insert into rows values (?, ?)", enumerate(row.tobytes() for row in table()))
        self.base.commit()
        return self.zip, self.tar, self.base

    def __getitem__(self, index):
        entry = self.tar.extractfile(f"{index}")
        assert entry
        (row,) = self.base.execute("select row from rows where number = ?", (index,)).fetchone()
        copies = [np.frombuffer(read, np.float32) for read in (self.zip.read(f"{index}"), entry.read(), row)]
        return (super().__getitem__(index) + sum(copies)) / 4


class Empty(Rows):
    def __len__(self):
        return 0


class OfDataset(Sound):
    dataset: Any = Rows

    def data(self, split):
        return self.dataset()


class NoisyDataset(OfDataset):
    dataset = NoisyRows


class OwnGeneratorDataset(OfDataset):
    dataset = OwnGenerator


class OwnGeneratorSeededDataset(OfDataset):
    dataset = OwnGeneratorSeeded


class OwnTransformDataset(OfDataset):
    dataset = OwnTransform


class OwnTransformSeededDataset(OfDataset):
    dataset = OwnTransformSeeded


class FreshGeneratorDataset(OfDataset):
    dataset = FreshGenerator


class NoisyTestSplit(Sound):
    def data(self, split):
        return Rows() if split == "train" else FreshGenerator()


class NoisyReaderDataset(OfDataset):
    dataset = NoisyReader


class SeededDataset(OfDataset):
    dataset = SeededRows


class KeptNoiseDataset(OfDataset):
    dataset = KeptNoise


class KeptSamplesDataset(OfDataset):
    dataset = KeptSamples


class AscendingDataset(OfDataset):
    dataset = Ascending


class WritableFileDataset(OfDataset):
    dataset = WritableFile


class OpenFilesDataset(OfDataset):
    dataset = OpenFiles


class EmptyDataset(OfDataset):
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
