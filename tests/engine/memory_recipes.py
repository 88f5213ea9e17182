"""Recipes that need less memory than they would."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from flyte_ddp.recipe import CPU
from tests.engine.probe_recipes import SIZE, WIDTH, Sound

MOST = 3  # samples at a time that Tight has memory for


class Block(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        Block.calls += torch.is_grad_enabled()
        factor = random.random() + np.random.rand() if self.training else 1.0
        return features + factor * F.dropout(self.last(F.gelu(self.first(features))), 0.3, self.training)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        for block in self.blocks:
            features = block(features)
        return self.head(F.dropout(features, 0.5, self.training))


class Kept(Sound):
    ema_decay = 0.5

    def model(self):
        return Blocks()


class Recomputed(Kept):
    activation_checkpointing = ("blocks.*", "blocks.0.last")


class RecomputedInParts(Recomputed):
    micro_batch = 2


class KeptInParts(Kept):
    micro_batch = 2


class NoSuchLayer(Kept):
    activation_checkpointing = ("block.*",)


class OnlyAList(Kept):
    activation_checkpointing = ("blocks",)


class RecomputedBatchNorm(Sound):
    activation_checkpointing, body = ("1",), staticmethod(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH)))


class BatchNormElsewhere(Sound):
    activation_checkpointing, body = ("0",), staticmethod(lambda: nn.BatchNorm1d(WIDTH))


class Tight(Kept):
    micro_batch = -1

    def model(self):
        return nn.Sequential(super().model(), nn.BatchNorm1d(WIDTH))

    def data(self, split):
        return torch.cat([super().data(split)] * 2)

    def forward(self, model, batch):
        if torch.is_grad_enabled() and len(batch) > MOST and len(batch) < 2 * SIZE:
            raise torch.OutOfMemoryError(f"{len(batch)} samples on {CPU}")
        return super().forward(model, batch)


class Fixed(Tight):
    micro_batch = 2


class Hopeless(Tight):
    def forward(self, model, batch):
        if model.training and not self.share.alone:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return super().forward(model, batch)
