"""What a step does besides its passes: to gradients, statistics and random numbers."""

import pytest
import torch
from torch import distributed, nn

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.step import ReplicatedStep, SingleStep, Step
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import WIDTH, Settings, Sound


class InSingles(Sound):
    """Its last part of a batch of eight is a single sample, of which batch norm's variance is NaN."""

    micro_batch, body = 7, staticmethod(lambda: nn.BatchNorm1d(WIDTH))


class Whole(Sound):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.1)  # others do not follow how large gradients are


class InThrees(Whole):
    micro_batch = 3


class Nudged(torch.optim.SGD):
    """Draws in its steps."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn_like(weight), alpha=0.1)


class Drawing(Sound):
    more = 0

    def measure(self, outputs, batch):
        torch.rand(self.more)
        return super().measure(outputs, batch)

    def optimizer(self, model):
        return Nudged(model.parameters(), 0.1)


class DrawingMore(Drawing):
    more = 3


def weights(recipe, output):
    result = train(recipe, Settings(), RunOptions(tracking="off"), output=output)
    return torch.load(result.model_path, weights_only=True)


def test_a_part_of_a_single_sample_leaves_statistics_that_are_finite(alone, tmp_path):
    assert all(weight.isfinite().all() for weight in weights(InSingles, tmp_path).values())


def test_a_step_in_parts_is_that_of_the_whole_batch(alone, tmp_path):
    whole, in_parts = (weights(recipe, tmp_path / recipe.__name__) for recipe in (Whole, InThrees))
    torch.testing.assert_close(in_parts, whole, rtol=1e-4, atol=1e-6)


def test_all_ranks_have_as_many_parts_since_each_may_exchange_something():
    recipe = Sound(Settings())
    step = SingleStep(Step(recipe.model(), recipe, ("loss",), 2, False))
    for count in (3, 2):
        parts = step.parts(Batch(torch.ones(count, WIDTH), BatchShare(count=count, size=5)), 2)
        assert [part.share.borrowed for part in parts] == [False, count == 2]


def test_what_an_optimizer_draws_does_not_follow_what_a_rank_has_drawn_in_its_passes(alone, tmp_path):
    """Otherwise the weights of ranks would drift apart."""
    one, other = (weights(recipe, tmp_path / recipe.__name__) for recipe in (Drawing, DrawingMore))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


class Sometimes(Sound):
    """Its last layer is for samples that begin with a positive number."""

    def forward(self, model, batch):
        features = model[0](batch)
        return model[2](features) if batch[0, 0] > 0 else features


@pytest.mark.parametrize("has_unused", [False, True])
def test_a_weight_that_a_rank_does_not_use_has_a_gradient_of_0_or_none(tmp_path, has_unused):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        recipe = Sometimes(Settings())
        model = recipe.model()
        step = ReplicatedStep(Step(model, recipe, ("loss",), 1, False), has_unused)
        for sign in (1, -1, 1):  # where gradients are missing, DistributedDataParallel fails a step later
            step.zero_grad()
            batch = Batch(sign * torch.ones(2, WIDTH), BatchShare(count=2, size=2))
            step.add_up_gradients(step(batch, (False, False), True).backward)
            gradient = model[2].weight.grad
            assert (gradient is None) is (has_unused and sign < 0)
            assert gradient is None or bool(gradient.any()) is (sign > 0)
    finally:
        distributed.destroy_process_group()
