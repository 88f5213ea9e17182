"""Without virtual ranks a training is DistributedDataParallel's, and exact where that can be."""

import random as stdlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributed, nn

from flyte_ddp import training
from flyte_ddp.errors import InputError
from flyte_ddp.events import RunStarted
from flyte_ddp.launch.failures import RankError
from flyte_ddp.recipes.images import ImageClassifier
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import WIDTH, Settings, Sound
from tests.small_training import Unplugged, identical, relative_difference, unplug_at

# Of 33 samples a step the shares of two ranks differ, and the last step has 21
UNEVEN = {"batch_size": 33, "epochs": 2}


class Drawing(ImageClassifier):
    """Draws by all generators, in augment() and in the network, and normalises by its samples."""

    def augment(self, batch, random):
        images, labels = batch
        moved = images.roll(int(torch.randint(-2, 3, ())), -1)
        return (moved.flip(-1) if np.random.rand() < 0.5 or random.epoch + stdlib.random() < 0.2 else moved), labels

    def model(self):
        super().model()  # which says how images are normalised
        side = self.description.image_shape[-1]
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(),
            nn.Linear(4 * side * side, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 10),
        )  # fmt: skip


class InMicroBatches(Drawing):
    micro_batch = 7


class Nudging(Drawing):
    """Has an optimizer that draws."""

    def optimizer(self, model):
        return Langevin(model.parameters(), lr=0.01)


class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn_like(weight), alpha=1e-3)


class Counting(ImageClassifier):
    """Counts how many other samples of the batch have got the same random number."""

    def measure(self, outputs, batch):
        drawn = torch.rand(len(outputs)).double() + stdlib.random() + np.random.rand()
        alike = (drawn[:, None] == self.all_gather(drawn)).sum(1) - 1
        return {**super().measure(outputs, batch), "alike": alike}


class Norm(nn.Module):
    """Subtracts the running mean of what it has seen, in evaluation mode, too."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images):
        moved = images - self.mean
        with torch.no_grad():
            self.mean += 0.05 * (images.mean() - self.mean)
        return moved


class Folding(nn.Linear):
    """Changes its weights in evaluation mode, as loralib's layers do: here by a factor that rounds nothing."""

    factor = 1

    def train(self, mode=True):
        factor = 1 if mode else 2
        with torch.no_grad():
            self.weight *= factor / self.factor
        self.factor = factor
        return super().train(mode)

    def forward(self, features):
        return nn.functional.linear(features, self.weight / self.factor, self.bias)


class Following(ImageClassifier):
    last: type[nn.Linear] = nn.Linear

    def model(self):
        super().model()
        return nn.Sequential(Norm(), nn.Flatten(), self.last(self.description.image_shape[-1] ** 2, 10))


class Folded(Following):
    last = Folding


class ClippedByValue(Following):
    """Clips gradients by value in its optimizer's step, as a hook."""

    fused = True

    def optimizer(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=self.fused)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0.01))
        return optimizer


class ClippedByValueUnfused(ClippedByValue):
    fused = False


def named(recipe):
    return f"{__name__}:{recipe}"


@pytest.mark.parametrize(
    ("recipe", "nproc"),
    [("Drawing", 2), pytest.param("InMicroBatches", 2, marks=pytest.mark.slow)],
)
def test_as_many_virtual_ranks_compute_the_same_up_to_rounding(train, recipe, nproc):
    settings = {"recipe": named(recipe), **UNEVEN, "train_fraction": 54 / 318}  # few steps, as each amplifies rounding
    plain = train(nproc, name="plain", **settings)
    exact = train(1, name="exact", virtual_ranks=nproc, **settings)
    alone = train(1, name="alone", **settings)
    assert relative_difference(plain, exact) < 1e-4
    assert relative_difference(plain, alone) > 0.1  # which draws, and normalises, otherwise


@pytest.mark.parametrize(("nproc", "virtual_ranks"), [(2, 0), (1, 2)])
def test_each_rank_or_part_draws_its_own_numbers(train, nproc, virtual_ranks):
    result = train(nproc, recipe=named("Counting"), virtual_ranks=virtual_ranks, **UNEVEN).result
    assert [epoch.train["alike"] for epoch in result.epochs] == [0, 0]


@pytest.mark.parametrize("recipe", ["InMicroBatches", pytest.param("Nudging", marks=pytest.mark.slow)])
def test_a_run_that_was_cut_off_goes_on_with_as_many_ranks_to_the_same_bits(train, recipe):
    settings = {"recipe": named(recipe), "log_interval": 1, **UNEVEN}
    expected = train(2, name="whole", **settings)
    with pytest.raises(Unplugged):
        train(2, name="cut", checkpoint_seconds=0, on_event=unplug_at(6), **settings)
    resumed = train(2, name="cut", **settings)
    assert resumed.events[0].first_step > 0
    assert identical(expected, resumed)


def test_buffers_that_evaluation_changes_go_on_as_in_the_checkpoint(train):
    settings = {"recipe": named("Following"), "log_interval": 1, **UNEVEN}
    expected = train(2, name="whole", **settings)
    with pytest.raises(Unplugged):
        train(2, name="cut", on_event=unplug_at(6, epoch=1), **settings)  # the checkpoint is of the epoch's beginning
    assert identical(expected, train(2, name="cut", **settings))


def test_weights_that_evaluation_mode_changes_are_kept_and_returned_as_trained(train):
    plain, folded = (train(1, recipe=named(recipe), name=recipe, epochs=2) for recipe in ("Following", "Folded"))
    assert identical(plain, folded)


def test_code_in_an_optimizers_step_sees_the_gradients_of_the_mean(train):
    fused, unfused = (train(1, recipe=named(f"ClippedByValue{end}"), name=f"c{end}") for end in ("", "Unfused"))
    assert relative_difference(fused, unfused) < 1e-4


def test_on_another_number_of_ranks_it_goes_on_and_says_that_the_result_is_another(train):
    settings = {"recipe": named("Drawing"), "log_interval": 1, **UNEVEN}
    with pytest.raises(Unplugged):
        train(2, name="cut", checkpoint_seconds=0, on_event=unplug_at(6), **settings)
    (started, *_) = train(1, name="cut", **settings).events
    assert isinstance(started, RunStarted)
    (remark,) = (remark for remark in started.remarks if "number of ranks" in remark)
    assert "another number of ranks (2) than this (1)" in remark
    assert "virtual_ranks" in remark


class Nines(nn.Module):
    """Has an expert that only samples of the last class use, in few steps."""

    def __init__(self, features):
        super().__init__()
        self.head, self.expert = nn.Linear(features, 10), nn.Linear(features, 10)

    def forward(self, images, labels):
        rows, is_nine = images.flatten(1), labels == 9
        outputs = self.head(rows)
        if is_nine.any():
            outputs = outputs.index_add(0, is_nine.nonzero()[:, 0], self.expert(rows[is_nine]))
        return outputs


class Routed(ImageClassifier):
    def model(self):
        super().model()
        return Nines(self.description.image_shape[-1] ** 2)

    def forward(self, model, batch):
        return model(self.normalise(batch[0]), batch[1])

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.3)


@pytest.mark.parametrize("virtual_ranks", [0, 2])
def test_weights_that_no_rank_uses_in_a_step_stay_as_they_are(train, virtual_ranks):
    settings = {"recipe": named("Routed"), "batch_size": 4, "train_fraction": 0.2}
    alone = train(1, name="alone", **settings)
    both = train(2, name="both", virtual_ranks=virtual_ranks, **settings)
    assert relative_difference(alone, both) < 1e-3  # decay in each step would halve them


def test_of_three_ranks_the_one_that_drifts_is_named(train):
    words = r"weights have other bits on rank 2 on .* than on rank 0"
    with pytest.raises(RankError, match=words):
        train(3, recipe=named("LastDrifts"), batch_size=33)


class Exchanging(Drawing):
    """Centres its samples by the mean of all ranks' samples."""

    def forward(self, model, batch):
        images = self.normalise(batch[0])
        mean = images.mean()
        distributed.all_reduce(mean)
        return model(images - mean / distributed.get_world_size())


def test_code_that_exchanges_something_trains_and_is_refused_with_virtual_ranks(train):
    settings = {"recipe": named("Exchanging"), **UNEVEN, "train_fraction": 54 / 318}
    assert train(2, name="plain", **settings).result.epochs
    with pytest.raises(InputError, match=r"in epoch 1, step 1, gradients .* other bits .* by torch.distributed"):
        train(2, name="exact", virtual_ranks=2, **settings)


class LastDrifts(Drawing):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1 if distributed.get_rank() < 2 else 0.2)


class Synchronized(Sound):
    body = staticmethod(lambda: nn.SyncBatchNorm(WIDTH))


class SynchronizedInWhatFits(Synchronized):
    micro_batch = -1


def test_statistics_of_all_ranks_are_refused_with_virtual_ranks(alone, tmp_path):
    settings = replace(Settings(), virtual_ranks=2)
    with pytest.raises(
        InputError, match=r"1 must not be nn.SyncBatchNorm with virtual_ranks, got 2, .*: leave convert_"
    ):
        training.train(named("Synchronized"), settings, RunOptions(tracking="off"), output=tmp_path)


def test_statistics_of_all_ranks_are_refused_where_ranks_try_what_fits(train):
    words = r"1 must not be nn.SyncBatchNorm with micro_batch = -1, since .*: give micro_batch a number of samples, or"
    with pytest.raises(InputError, match=words):
        train(2, recipe=named("SynchronizedInWhatFits"))
