"""A small training that breaks on purpose: on the ranks and at the step that its settings say."""

import os
import signal
import threading
from dataclasses import dataclass
from typing import Any, Tuple

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.recipe import Random
from flyte_ddp.recipes.classifier import Classifier
from flyte_ddp.settings import TrainingSettings, setting

FAULTS = ("none", "nan", "sleep", "sleep in the data", "stop", "kill", "sleeping kernel")
SAMPLES, FEATURES = 512, 16
CYCLES = 10**12  # of a sleeping kernel: minutes


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """ranks: that break, with commas between them; step: of the first epoch, from 1."""

    batch_size: int = setting(32, minimum=1)
    precision: str = setting("float32")
    log_interval: int = setting(1, minimum=1)
    fault: str = setting("none", choices=FAULTS)
    ranks: str = setting("0")
    step: int = setting(5, minimum=1)


class Faulty(Classifier):
    settings: Settings

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.fault = self.settings.fault if str(distributed.get_rank()) in self.settings.ranks.split(",") else "none"
        self.steps = 0

    def data(self, split: str) -> Tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(len(split))
        features = torch.randn(SAMPLES, FEATURES, generator=generator)
        return features, (features.sum(1) > 0).long()

    def model(self) -> nn.Module:
        # batch norm has collectives of its own in the middle of a step
        return nn.Sequential(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))

    def augment(self, batch: Any, random: Random) -> Any:
        self.steps += not self.share.alone  # a look at the recipe is no step
        if self.fault == "sleep in the data" and self.is_due():
            threading.Event().wait()
        return batch

    def is_due(self) -> bool:
        return self.steps == self.settings.step and not self.share.alone

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        features = batch[0]
        if self.is_due():
            features = self.broken(features)
        scores: Tensor = model(features)
        return scores

    def broken(self, features: Tensor) -> Tensor:
        if self.fault == "sleep":
            threading.Event().wait()
        elif self.fault in ("stop", "kill"):
            os.kill(os.getpid(), signal.SIGSTOP if self.fault == "stop" else signal.SIGKILL)
        elif self.fault == "sleeping kernel":
            torch.cuda._sleep(CYCLES)
        return features * torch.nan if self.fault == "nan" else features
