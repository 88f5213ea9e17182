"""Trainings that send a SIGTERM to whoever has launched them, in a phase that a variable names."""

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipes.images import ImageClassifier

LAUNCHER = "DDP_TEST_LAUNCHER"  # its process id; not set where there is to be no notice
PHASE = "DDP_TEST_PHASE"
LINKS: list[Link] = []
seen: dict[str, int] = {}


def train(environment: Environment, link: Link, job: Job) -> TrainingResult:
    LINKS.append(link)
    return worker.run(environment, link, job)


def reach(phase: str) -> None:
    """Send the notice when the last rank comes to this phase, as in "evaluation 3" for the third time."""
    seen[phase] = seen.get(phase, 0) + 1
    is_last = LINKS and int(os.environ.get("DDP_TEST_RANK", "1")) == rank()
    if is_last and os.environ.get(PHASE) == f"{phase} {seen[phase]}" and LAUNCHER in os.environ:
        os.kill(int(os.environ[LAUNCHER]), signal.SIGTERM)
        while not LINKS[-1].stop_requested:
            os.sched_yield()


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Noticed(ImageClassifier):
    """Has all that a notice in an evaluation might change: a buffer that counts calls, dropout, an average."""

    def model(self) -> nn.Module:
        reach("set-up")
        model = nn.Sequential(super().model(), nn.BatchNorm1d(10), nn.Dropout(0.1))
        model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        return model

    def forward(self, model: Any, batch: Any) -> Any:
        phase = "trial" if self.share.alone else "step" if model.training else "evaluation"
        reach(phase)
        model.calls += 1
        return super().forward(model, batch)

    def pictures(self, outputs: Any, batch: Any) -> list[tuple[str, Tensor]]:
        reach("results")
        return []
