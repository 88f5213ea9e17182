"""A host that is ahead of its device, tried on a CPU: the flag of each step is read three steps later.

Its ranks import this module, so it imports nothing that takes long.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from flyte_ddp.engine import sums, worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.readback import Readback
from flyte_ddp.engine.virtual_ranks import ahead
from flyte_ddp.engine.virtual_ranks.ahead import Ahead
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.failures import RankError
from flyte_ddp.launch.link import Link
from flyte_ddp.recipes.images import ImageClassifier
from tests.small_training import WORKER, Unplugged, identical, unplug_at

BEHIND = 3  # steps


class Leaping(ImageClassifier):
    """Gradients are 2^30 times as large in some steps, which so do not fit their units. Batch norm counts each step."""

    def measure(self, outputs, batch):
        measured = super().measure(outputs, batch)
        images = batch[0]
        is_large = images.flatten(1).sum(1, dtype=torch.int64) % 40 == 0
        return {**measured, "objective": measured["loss"] * torch.where(is_large, 2.0**30, 1.0)}


class Broken(Leaping):
    """The loss is finite throughout, and a gradient isn't from the twelfth step on."""

    now = 0

    def lr_lambda(self, step, total_steps):
        self.now = step
        return super().lr_lambda(step, total_steps)

    def forward(self, model, batch):
        scores = super().forward(model, batch)
        return scores + (0 * scores).sqrt() if self.now >= 11 and not self.share.alone else scores


class Hooked(Leaping):
    """Its optimizer does more in each step than torch's kernel."""

    def optimizer(self, model):
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


class Behind(Readback):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self.behind = BEHIND


@contextmanager
def delayed(calls: Counter[str]) -> Iterator[None]:
    """Let the host be ahead of the CPU, and count the steps in which it was, and those that were taken again."""

    def counted(owner: type, name: str) -> Any:
        method = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return method(*arguments)

        return patch.object(owner, name, call)

    with (
        patch.multiple(ahead, DEVICES=("cpu",), WAITS=2),
        patch.object(sums, "Readback", Behind),
        counted(ExactStep, "add_up_ahead"),
        counted(Ahead, "go_back"),
    ):
        yield


def run_ahead(environment: Environment, link: Link, job: Job) -> TrainingResult:
    calls: Counter[str] = Counter()
    with delayed(calls):
        result = worker.run(environment, link, job)
    assert calls["add_up_ahead"] > calls["go_back"] > 1, calls
    return result


def run_hooked(environment: Environment, link: Link, job: Job) -> TrainingResult:
    calls: Counter[str] = Counter()
    with delayed(calls):
        result = worker.run(environment, link, job)
    assert not calls, "the hook would run in steps that are skipped"
    return result


NAME, AHEAD = f"{__name__}:Leaping", f"{__name__}:run_ahead"
SETTINGS: dict[str, Any] = {
    "virtual_ranks": 3,
    "epochs": 2,
    "shift_pixels": 2,
    "model": "fashion_cnn",
    "recipe": NAME,
    "log_interval": 7,
}


def test_steps_that_do_not_fit_are_taken_again_to_the_same_bits(train, whole):
    waiting = whole(1, **SETTINGS)
    for nproc in (1, 2):
        assert identical(waiting, train(nproc, name=f"{nproc}", target=AHEAD, **SETTINGS))


def test_a_checkpoint_has_no_step_that_is_not_final(train, whole):
    waiting = whole(1, **SETTINGS)
    more = {**SETTINGS, "name": "killed", "target": AHEAD, "checkpoint_seconds": 0}
    with pytest.raises(Unplugged):
        train(2, on_event=unplug_at(14, epoch=1), **more)
    assert identical(waiting, train(3, **{**more, "target": WORKER}))


def test_a_gradient_that_is_not_finite_is_named_with_its_step(train):
    with pytest.raises(RankError, match=r"gradient is not finite in epoch 1, step 12\b"):
        train(2, **{**SETTINGS, "recipe": f"{__name__}:Broken"}, target=AHEAD)


def test_an_optimizer_with_a_hook_waits(train):
    train(1, **{**SETTINGS, "recipe": f"{__name__}:Hooked"}, target=f"{__name__}:run_hooked")
