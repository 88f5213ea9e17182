"""Recipes with one fault each, and some that only look like one."""

import multiprocessing
import os
import random as python_random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import Dataset
from torchvision.ops import StochasticDepth

from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings, setting

SIZE, WIDTH = 12, 8


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = setting(8, minimum=1)
    epochs: int = setting(1, minimum=1)
    precision: str = setting("float32", choices=("float32",))


def table(seed=0):
    return np.random.default_rng(seed).normal(size=(SIZE, WIDTH)).astype(np.float32)


class Sound(Recipe):
    """What is right: the others change one thing of it."""

    body: Any = nn.Identity

    def data(self, split):
        return torch.from_numpy(table())

    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), self.body(), nn.Linear(WIDTH, WIDTH))

    def forward(self, model, batch):
        return model(batch)

    def measure(self, outputs, batch):
        return {"loss": (outputs - batch).square().mean(1)}


def body(forward):
    """A layer without parameters that does this to its features."""
    return type("Body", (nn.Module,), {"forward": lambda self, features: forward(features)})


class Validated(Sound):
    """Has a validation split of its own."""

    has_validation = True

    def data(self, split):
        return super().data(split)[:5] if split == "validation" else super().data(split)


class Undirected(Sound):
    """Its headline may be better the more of it there is, or the less."""

    headline = "spread"

    def measure(self, outputs, batch):
        return {**super().measure(outputs, batch), "spread": outputs.std(1)}


# --- random numbers ---


class FunctionalDropout(Sound):
    body = body(lambda features: F.dropout(features, 0.5))


class RandnLike(Sound):
    body = body(lambda features: features + torch.randn_like(features))


class DropPath(Sound):
    body = body(lambda features: features * (torch.rand(len(features), 1) > 0.5))


class TorchvisionDropPath(Sound):
    def forward(self, model, batch):
        return StochasticDepth(0.5, "row")(model(batch))


class RandomLeakyReLU(Sound):
    body = nn.RReLU


class LSTM(Sound):
    """Between its layers, torch's C++ draws with time in the first dimension, and the samples in the second."""

    def model(self):
        return nn.LSTM(1, WIDTH, num_layers=2, batch_first=True, dropout=0.5)

    def forward(self, model, batch):
        return model(batch[:, :, None])[0][:, -1]


class Transformer(Sound):
    def model(self):
        return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, model, batch):
        return model(batch[:, None, :])[:, 0]


class OneForTheBatch(Sound):
    """The same number on all ranks, which start each step from the same state."""

    body = body(lambda features: features * torch.rand(()))


class AugmentByTorch(Sound):
    def augment(self, batch, random):
        return batch + torch.randn(batch.shape)


class AugmentByNumpy(Sound):
    def augment(self, batch, random):
        return batch + np.random.normal()


class ForwardByPython(Sound):
    def forward(self, model, batch):
        return model(batch) * python_random.random()


class ForwardByGenerator(Sound):
    """A generator of the recipe's own, whose state cannot be seen."""

    def forward(self, model, batch):
        return model(batch) + torch.from_numpy(np.random.default_rng().normal(size=batch.shape).astype(np.float32))


class RarelyLonger(Sound):
    """Drops what is padded to the longest of a rank's samples, which differs as soon as one that is longer comes."""

    def data(self, split):
        rows = table()
        rows[(np.arange(SIZE) != 5) | (split == "test"), -1] = 0  # the fifth is not among those that are tried
        return torch.from_numpy(rows)

    def forward(self, model, batch):
        length = WIDTH if batch[:, -1].any() else WIDTH - 1
        return model(F.pad(F.dropout(batch[:, :length], 0.5), (0, WIDTH - length)))


# --- samples that depend on one another ---


class MeanOfBatch(Sound):
    body = body(lambda features: features - features.mean(0))


class Mixup(Sound):
    def augment(self, batch, random):
        return batch + batch.roll(1, 0)


class Ranked(Sound):
    def measure(self, outputs, batch):
        loss = (outputs - batch).square().mean(1)
        return {"loss": loss, "worst": loss == loss.max()}


class Contrastive(Sound):
    def measure(self, outputs, batch):
        return {"loss": F.cross_entropy(outputs @ batch.T, torch.arange(len(batch)), reduction="none")}


class UndeclaredEveryone(Sound):
    def measure(self, outputs, batch):
        places = self.share.first + torch.arange(len(batch))
        return {"loss": F.cross_entropy(outputs @ self.everyone(batch).T, places, reduction="none")}


class Everyone(UndeclaredEveryone):
    couples_samples = True


class EveryoneFromZero(Sound):
    """Forgets where in the global batch the rank's samples are: right on one rank alone."""

    couples_samples = True

    def measure(self, outputs, batch):
        scores = outputs @ self.everyone(batch).T
        return {"loss": F.cross_entropy(scores, torch.arange(len(batch)), reduction="none")}


class RunningMean(nn.Module):
    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, features):
        self.mean.lerp_(features.detach().mean(0), 0.1)
        return features


class Buffer(Sound):
    body = RunningMean


class SpectralNorm(Sound):
    """Its buffers change, but follow no samples."""

    def model(self):
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


# --- datasets ---


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


# --- measures and gradients ---


class Unused(Sound):
    def model(self):
        model = super().model()
        model.add_module("spare", nn.Linear(WIDTH, WIDTH))
        return model

    def forward(self, model, batch):
        return model[2](model[0](batch))


class Detached(Sound):
    def measure(self, outputs, batch):
        return {"loss": (outputs.detach() - batch).square().mean(1)}


class ScalarLoss(Sound):
    def measure(self, outputs, batch):
        return {"loss": F.mse_loss(outputs, batch)}


class NaNWeights(Sound):
    weight = torch.nan

    def measure(self, outputs, batch):
        loss = super().measure(outputs, batch)["loss"]
        return {"loss": (loss, torch.full_like(loss, self.weight))}


class InfiniteWeights(NaNWeights):
    weight = torch.inf


class DerivedTensor(Sound):
    def derive(self, measures):
        return {**measures, "both": torch.zeros(2)}


class NoLoss(Sound):
    def measure(self, outputs, batch):
        return {"error": (outputs - batch).square().mean(1)}


class Headline(Sound):
    headline = "acuracy"


class AugmentDrops(Sound):
    def augment(self, batch, random):
        return batch[1:]


class MicroBatchNorm(Sound):
    micro_batch, body = 2, staticmethod(lambda: nn.BatchNorm1d(WIDTH))


class MicroEveryone(Everyone):
    micro_batch = 2


class GroupedNorm(Sound):
    """Three rows for each sample, one after another."""

    norm_samples, micro_batch = 2, 4

    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, eps=0.01), nn.Linear(WIDTH, WIDTH))

    def forward(self, model, batch):
        return model(batch.repeat_interleave(3, 0)).unflatten(0, (-1, 3)).mean(1)


class GroupedNormOfSteps(GroupedNorm):
    """Three rows for each sample, the first ones of all samples coming first."""

    def forward(self, model, batch):
        return model(batch.repeat(3, 1)).unflatten(0, (3, -1)).mean(0)


class GroupedNormOfSome(GroupedNorm):
    """Not as many rows for each sample."""

    def forward(self, model, batch):
        return torch.cat([model(batch[:-1]), batch[-1:]])


class Routed(nn.Module):
    """Experts, each for some of the samples; the last of them for a single one of the whole table."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows):
        lone = (rows[:, 0] == table()[6, 0]).long()
        routes, outputs = torch.where(lone == 1, 2, (rows[:, 1] > 0).long()), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if (routes == number).any():
                outputs[routes == number] = expert(rows[routes == number])
        return outputs


class Experts(Sound):
    def model(self):
        return Routed()


class NeverEmpty(nn.Module):
    """Layers that fail without samples, and layers that see the global batch."""

    def __init__(self):
        super().__init__()
        self.experts = Routed()
        self.gru = nn.GRU(1, WIDTH, batch_first=True)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, eps=0.01), nn.Dropout(0.2))

    def forward(self, rows):
        features = F.instance_norm(self.experts(rows).unflatten(1, (2, -1))).flatten(1)
        packed = pack_padded_sequence(features[:, :, None], torch.full((len(rows),), WIDTH), batch_first=True)
        return self.body(self.gru(packed)[1][0])


class Borrowing(Everyone):
    def model(self):
        return NeverEmpty()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.5, weight_decay=0.1)

    def augment(self, batch, random):
        return batch + 0.1 * random.normal(WIDTH) * (torch.arange(WIDTH) > 0)

    def predictions(self, outputs, batch):
        return outputs


class BorrowingGroups(Borrowing):
    norm_samples = 2


# --- other ways to go wrong, and to be odd ---


class Permitted(MeanOfBatch):
    may_depend_on_ranks = True


class OneRankRaises(Sound):
    def measure(self, outputs, batch):
        if os.environ.get("RANK", "0") == "1" or self.share.first:
            raise ZeroDivisionError("only where the share begins later")
        return super().measure(outputs, batch)


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


NotARecipe = Settings
