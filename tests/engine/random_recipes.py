"""Recipes that draw random numbers, with a seed for each step and rank; and from a generator that nobody seeds."""

import random as python_random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.ops import StochasticDepth

from tests.engine.probe_recipes import SIZE, WIDTH, Sound, body, table


class DropPath(Sound):
    body = staticmethod(lambda: StochasticDepth(0.5, "row"))


class RandomLeakyReLU(Sound):
    body = nn.RReLU


class LSTM(Sound):
    """Between its layers, torch's C++ draws."""

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
        rows[np.arange(SIZE) != 5, -1] = 0
        return torch.from_numpy(rows)

    def forward(self, model, batch):
        length = WIDTH if batch[:, -1].any() else WIDTH - 1
        return model(F.pad(F.dropout(batch[:, :length], 0.5, model.training), (0, WIDTH - length)))


class TurnedAlike(Sound):
    def augment(self, batch, random):
        from torchvision.transforms import v2

        return v2.RandomAffine(30)(batch.view(-1, 1, 2, WIDTH // 2)).view(-1, WIDTH)


class TurnedEach(TurnedAlike):
    def augment(self, batch, random):
        return torch.cat([super(TurnedEach, self).augment(row, random) for row in batch])


class TurnedByOne(Sound):
    def augment(self, batch, random):
        return batch * torch.rand(())
