"""A training in which one rank is slower than the others."""

import os
import time
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks.slowed_settings import FEATURES, SAMPLES, Settings, core_of
from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Random
from flyte_ddp.recipes.classifier import Classifier


class Slowed(Classifier):
    settings: Settings

    def data(self, split: str) -> Any:
        count = SAMPLES if split == "train" else FEATURES
        features = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(len(split)))
        return features, (features.sum(1) > 0).long()

    def model(self) -> nn.Module:
        # The ranks meet a second time in a step, to broadcast the buffers of batch norm
        width = self.settings.width
        return nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))

    def augment(self, batch: Any, random: Random) -> Any:
        self.take_longer("data")
        return batch

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.take_longer("forward pass")
        scores: Tensor = model(batch[0])
        return scores

    def take_longer(self, way: str) -> None:
        settings = self.settings
        if (way, distributed.get_rank()) == (settings.way, settings.rank) and not self.share.alone:
            time.sleep(settings.milliseconds / 1e3)


def train_pinned(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Trains on a core of its own."""
    os.sched_setaffinity(0, {core_of(environment.rank)})
    return worker.run(environment, link, job)
