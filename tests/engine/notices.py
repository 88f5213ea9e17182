"""Trainings that send a SIGTERM to whoever has launched them, in a phase that a variable names."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp import Loop
from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipes.images import ImageClassifier
from tests.engine import own_loops

LAUNCHER = "DDP_TEST_LAUNCHER"  # its process id; not set where there is to be no notice
PHASE = "DDP_TEST_PHASE"
SENT = "DDP_TEST_SENT"  # the file that gets its time
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
        if SENT in os.environ:
            Path(os.environ[SENT]).write_text(str(time.time()))
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


def own_loop(loop: Loop, swaps: bool = False) -> None:
    """Evaluates as in training, so that buffers change, once in each epoch and once after the last."""
    torch.manual_seed(0)
    model = loop.wrap(own_loops.network(dropout=0.3))
    batches, tests = loop.batches(own_loops.Drawn()), loop.evaluation(own_loops.few(40))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    average = own_loops.Average(model)
    loop.keep(model=model, optimizer=optimizer, schedule=schedule, average=average)
    for _ in loop.epochs():
        for inputs, labels in batches:
            reach("step")
            own_loops.step(loop, model, optimizer, inputs, labels)
            average.update(model)
        schedule.step()
        before = [weight.detach().clone() for weight in model.parameters()]
        if swaps:
            put(model, average.weights)
        evaluate(loop, model, tests)
        loop.evaluated()
        put(model, before)
    evaluate(loop, model, tests)


def own_loop_that_swaps(loop: Loop) -> None:
    own_loop(loop, swaps=True)


def own_loop_that_leaves(loop: Loop) -> None:
    """Its ranks leave an evaluation after other batches than one another."""
    model, batches, tests, optimizer = own_loops.linear(loop, test=41)
    for _ in loop.epochs():
        for inputs, labels in batches:
            own_loops.step(loop, model, optimizer, inputs, labels)
        evaluate(loop, model, tests, batches=3 * loop.rank + 1)
        loop.evaluated()


def put(model: nn.Module, weights: list[Tensor]) -> None:
    """As people write it: torch does not count this as a change of the weights."""
    for weight, value in zip(model.parameters(), weights, strict=True):
        weight.data.copy_(value)


def evaluate(loop: Loop, model: nn.Module, tests: Any, batches: int = 100) -> None:
    for number, (inputs, labels) in enumerate(tests, 1):
        reach("evaluation")
        with torch.no_grad():
            loop.measured(loss=nn.functional.cross_entropy(model(inputs), labels, reduction="none"))
        if number == batches:
            break
