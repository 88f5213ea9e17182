"""Batch norm by groups of samples: what it computes, and that no rank needs another's statistics for it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.global_batch.ghost_batch_norm import RunningStatistics
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode
from flyte_ddp.errors import InputError
from tests.engine.mode_targets import Applied, Derived
from tests.small_training import Unplugged, identical, relative_difference, unplug_at

IN_PARTS = "tests.engine.norm_recipes:InParts"
# 98 images: in the last of seven steps there are two of them, a single short group
NETWORK = {"model": "fashion_cnn", "train_fraction": 98 / 318, "learning_rate": 0.005}
GROUPS = {**NETWORK, "ghost_batch_size": 4}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Functional(nn.Module):
    """Statistics by names of their own, and a buffer that is none."""

    average: torch.Tensor
    spread: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("masked", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("spread", torch.ones(3))

    def forward(self, features):
        return F.batch_norm(features, self.average, self.spread, training=True, momentum=0.3)


def step(model, features, ghost_batch_size, shares=None, slopes=None):
    """Outputs of a step, by ranks with these shares (first, count) one after the other."""
    mode, size = GlobalBatchMode(BatchShare()), len(features)
    mode.running = running = RunningStatistics(model)
    outputs, sums = [], torch.zeros(running.size)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for first, count in shares or [(0, size)]:
        mine = slice(first, first + count)
        vars(mode.share).update(first=first, count=count, size=size, ghost_batch_size=ghost_batch_size)
        model.load_state_dict(before, strict=False)
        running.start()
        with mode.block(0):
            outputs.append(model(features[mine]))
            written = torch.empty(running.size)
            running.write(written)
            if slopes is not None:
                outputs[-1].backward(slopes[mine])
        sums += written
    running.move(sums)
    return torch.cat(outputs)


def by_group(features, size):
    """Normalised, the mean of all values by channel, and the variance around the means of groups."""
    groups = features.split(size)
    normalised = [
        F.batch_norm(group, None, None, training=True) if group.numel() > 3 else 0 * group for group in groups
    ]
    values = [group.transpose(0, 1).flatten(1) for group in groups]
    squares = sum((group - group.mean(1, keepdim=True)).square().sum(1) for group in values)
    count = sum(group.shape[1] for group in values)
    return torch.cat(normalised), torch.cat(values, 1).mean(1), squares / (count - len(groups))


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (7, 3, 2, 2), (9, 3), (3, 3, 4)])
def test_each_group_is_normalised_as_by_torch_and_statistics_move_once(shape):
    layer, features = nn.BatchNorm1d(3) if len(shape) < 4 else nn.BatchNorm2d(3), 5 + 2 * torch.randn(shape)
    inputs, slopes = features.clone().requires_grad_(), torch.randn(shape)
    expected, mean, variance = by_group(features.requires_grad_(), 4)
    found = step(layer, inputs, 4, slopes=slopes)
    expected.backward(slopes)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)  # of a single value, rounding is all that is left
    torch.testing.assert_close(inputs.grad, features.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(layer.get_buffer("running_mean"), 0.1 * mean)
    torch.testing.assert_close(layer.get_buffer("running_var"), 0.9 + 0.1 * variance)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("ghost_batch_size", [8, 16])
def test_a_single_group_is_torchs_own_batch_norm(ghost_batch_size):
    ours, theirs, features = nn.BatchNorm2d(3), nn.BatchNorm2d(3), torch.randn(8, 3, 4, 4)
    for _ in range(2):
        torch.testing.assert_close(step(ours, features, ghost_batch_size), theirs(features))
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer)


@pytest.mark.parametrize(
    "build", [lambda: Derived(3, momentum=None), lambda: nn.BatchNorm1d(3, affine=False), Functional]
)
def test_ranks_need_nothing_of_each_other_whoever_wrote_the_layer(build):
    one, three, features = build(), build(), torch.randn(10, 3, 4)
    for _ in range(3):
        expected = step(one, features, 2)
        torch.testing.assert_close(step(three, features, 2, [(0, 2), (2, 4), (6, 4)]), expected)
    for name, buffer in one.named_buffers():
        torch.testing.assert_close(three.get_buffer(name), buffer)
    assert any(not torch.equal(buffer, build().get_buffer(name)) for name, buffer in one.named_buffers())


def test_a_layer_that_no_sample_has_used_keeps_its_statistics_and_one_used_twice_moves_once():
    used, unused, features = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.randn(8, 3)
    unused.get_buffer("running_mean").fill_(torch.inf)
    model = Applied(lambda rows: used(used(rows)))
    model.used, model.unused = used, unused
    step(model, features, 4)
    _, first, _ = by_group(features, 4)
    # the second time, the mean is 0
    torch.testing.assert_close(used.get_buffer("running_mean"), 0.1 * first / 2)
    assert unused.get_buffer("running_mean").isinf().all()


def test_groups_of_one_value_leave_the_variance_as_it_is():
    layer = nn.BatchNorm1d(3)
    torch.testing.assert_close(step(layer, torch.randn(4, 3), 1), torch.zeros(4, 3), rtol=0, atol=1e-4)
    assert torch.equal(layer.get_buffer("running_var"), torch.ones(3))


def test_a_layer_that_is_computed_again_in_the_backward_pass_counts_once():
    plain, again, features = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.randn(8, 3)
    model = Applied(lambda rows: checkpoint(again, rows, use_reentrant=False))
    model.layer = again
    for network in (plain, model):
        step(network, features.clone().requires_grad_(), 4, slopes=torch.ones(8, 3))
    for name, buffer in plain.named_buffers():
        if name != "num_batches_tracked":
            assert torch.equal(buffer, again.get_buffer(name))


def test_buffers_without_numbers_have_no_statistics():
    model = nn.Module()
    model.register_buffer("nothing", torch.zeros(0))
    RunningStatistics(model).move(torch.ones(2))


def test_running_statistics_that_are_no_buffers_are_refused():
    model = Applied(lambda rows: F.batch_norm(rows, torch.zeros(3), torch.ones(3), training=True))
    with pytest.raises(InputError, match="buffers of the network"):
        step(model, torch.randn(8, 3), 4)


def test_the_weights_are_the_same_on_any_number_of_ranks_and_in_parts(train):
    one, two, three = (train(ranks, name=f"{ranks}", **GROUPS) for ranks in (1, 2, 3))
    parts = train(2, name="parts", recipe=IN_PARTS, **GROUPS)
    assert {"norm1.running_mean", "norm1.running_var", "norm1.num_batches_tracked"} <= set(one.weights)
    for other in (two, three, parts):
        assert relative_difference(one, other) < 1e-4
        assert other.result.epochs[0].train["loss"] == pytest.approx(one.result.epochs[0].train["loss"], rel=1e-5)
        assert other.result.epochs[0].test["loss"] == pytest.approx(one.result.epochs[0].test["loss"], rel=1e-4)
    assert relative_difference(one, train(1, name="whole", **NETWORK)) > 1e-2


def test_a_run_that_was_cut_off_goes_on_with_the_same_bits(train):
    settings = {"recipe": IN_PARTS, "epochs": 2, "log_interval": 1, "ema_decay": 0.9, **GROUPS}
    expected = train(name="whole", **settings)
    with pytest.raises(Unplugged):
        train(name="cut", checkpoint_seconds=0, on_event=unplug_at(4), **settings)
    resumed = train(name="cut", checkpoint_seconds=0, **settings)
    assert resumed.events[0].first_step > 0
    assert identical(expected, resumed)
