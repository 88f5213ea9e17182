"""A small training that breaks on purpose, on the ranks and at the step given by its settings."""

import os
import signal
import tempfile
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import Dataset

from benchmarks.gpu_rows.fault_settings import SAMPLES, Settings
from flyte_ddp.recipe import Random
from flyte_ddp.recipes.classifier import Classifier

FEATURES = 16
CYCLES = 10**12  # of a sleeping kernel: minutes


class Samples(Dataset[Any]):
    def __init__(self, *tensors: Tensor):
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


class Faulty(Classifier):
    settings: Settings

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.fault = self.settings.fault if str(distributed.get_rank()) in self.settings.ranks.split(",") else "none"
        self.steps = 0

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(len(split))
        features = torch.randn(SAMPLES, FEATURES, generator=generator)
        labels = (features.sum(1) > 0).long()
        if self.settings.source == "dataset":
            return Samples(features, labels)
        if self.settings.source == "memory map":
            with tempfile.TemporaryFile() as file:
                mapped = np.memmap(file, np.float32, "w+", shape=(SAMPLES, FEATURES))
            mapped[:] = features.numpy()
            return mapped, labels
        return features, labels

    def model(self) -> nn.Module:
        # The ranks meet a second time in a step, to broadcast the buffers of batch norm
        return nn.Sequential(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))

    def augment(self, batch: Any, random: Random) -> Any:
        self.steps += not self.share.alone  # the probe's trials are not steps
        if self.fault == "sleep in the data" and self.is_due():
            threading.Event().wait()
        return batch

    def is_due(self) -> bool:
        return self.steps == self.settings.step and not self.share.alone

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if self.is_due():
            self.break_step()
        scores: Tensor = model(batch[0])
        # From then on, so that it recurs when the step is repeated
        is_broken = self.fault == "nan" and self.steps >= self.settings.step and not self.share.alone
        return scores * torch.nan if is_broken else scores

    def break_step(self) -> None:
        if self.fault == "sleep":
            threading.Event().wait()
        elif self.fault in ("stop", "kill"):
            os.kill(os.getpid(), signal.SIGSTOP if self.fault == "stop" else signal.SIGKILL)
        elif self.fault == "sleeping kernel":
            torch.cuda._sleep(CYCLES)
        elif self.fault == "out of memory":
            torch.empty(2**50, dtype=torch.uint8, device=self.device)
