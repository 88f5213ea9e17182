"""With virtual ranks the result has the same bits on any number of ranks, whatever disturbs the training."""

import os
from dataclasses import replace

import pytest
import torch
from torch import distributed, nn

from flyte_ddp import training
from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.errors import InputError
from flyte_ddp.events import RunStarted
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import RankError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.recipes.images import ImageClassifier
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import SIZE, WIDTH, Settings, Sound
from tests.engine.virtual_ranks.configurations import RANKS, settings_of
from tests.small_training import TWO_HOSTS, Unplugged, identical, unplug_at

AT_ONCE = 20  # configurations of one launch: each training leaves a thread of gloo behind
BATCH_NORM = {"model": "fashion_cnn", "shift_pixels": 2, "flip": True, "ema_decay": 0.9, "batch_size": 30}
# 106 images, 105 a step: in the last one only one part has a sample
SHORT = {"batch_size": 105, "train_fraction": 106 / 318, "learning_rate": 0.02, "label_smoothing": 0.1}


class Spiking(ImageClassifier):
    """Of which a few samples have gradients 2^30 times as large, and others 2^30 times as small, or 0."""

    def measure(self, outputs, batch):
        measured = super().measure(outputs, batch)
        kinds = batch[0].flatten(1).sum(1, dtype=torch.int64) % 40
        factors = torch.tensor([2.0**30, 0.0, 2.0**-30, *[1.0] * 37])
        return {**measured, "objective": measured["loss"] * factors[kinds]}


class Weighted(ImageClassifier):
    """Samples have weights that differ, and a third of the parts' sums are 0."""

    clip_norm = 0.5

    def measure(self, outputs, batch):
        measured = super().measure(outputs, batch)
        weights = (batch[1] % 3).float()
        return {**measured, "loss": (measured["loss"] * weights, weights)}


class Dropped(ImageClassifier):
    """Leaves out layers at random. In a short last batch a rank has no samples, and other draws."""

    def model(self):
        super().model()
        return Deep(self.description.image_shape[-1] ** 2)


class Deep(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.first, self.last = nn.Linear(features, 16), nn.Linear(16, 10)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, images):
        features = self.first(images.flatten(1)).relu()
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.5:
                features = features + layer(features).relu()
        return self.last(features)


@pytest.mark.kernels
def test_weights_that_borrowed_samples_alone_use_are_unused(train):
    settings = {"recipe": f"{__name__}:Dropped", "virtual_ranks": 2, "epochs": 3, **SHORT}
    assert identical(*(train(nproc, name=f"{nproc}", **settings) for nproc in (1, 2)))


@pytest.mark.kernels
def test_equal_bytes_on_one_two_three_and_five_ranks(train):
    one, *others = (train(nproc, name=f"{nproc}", virtual_ranks=5) for nproc in (1, 2, 3, 5))
    for other in others:
        assert identical(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{**BATCH_NORM, "precision": "bfloat16", "validation_fraction": 0.1}, SHORT])
def test_equal_bytes_with_what_a_network_may_have(train, settings):
    assert identical(*(train(nproc, name=f"{nproc}", virtual_ranks=5, **settings) for nproc in (1, 3)))


@pytest.mark.kernels
@pytest.mark.parametrize("recipe", ["Spiking", "Weighted"])
def test_equal_bytes_where_numbers_do_not_fit_or_weights_differ(train, recipe):
    name = f"tests.engine.virtual_ranks.test_same_bits:{recipe}"
    assert identical(*(train(nproc, name=f"{nproc}", virtual_ranks=4, recipe=name) for nproc in (1, 3)))


@pytest.mark.kernels
def test_as_close_as_rounding_to_a_training_without(train):
    few = {"train_fraction": 64 / 318}
    plain, exact = train(2, name="plain", **few), train(2, name="exact", virtual_ranks=4, **few)
    for name, weight in plain.weights.items():
        assert (weight - exact.weights[name]).abs().max() < 1e-5


class Raw(Sound):
    """Features of all sizes, normalised by the network."""

    sizes = torch.logspace(-4, 5, WIDTH)

    def data(self, split):
        return (super().data(split) + 1) * self.sizes

    def model(self):
        return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))

    def measure(self, outputs, batch):
        return super().measure(outputs, batch / self.sizes)


@pytest.mark.kernels
def test_statistics_are_as_close_beside_those_of_far_larger_features(alone, tmp_path):
    found = []
    for virtual_ranks in (0, 1):
        settings = replace(Settings(), epochs=4, batch_size=6, virtual_ranks=virtual_ranks)
        trained = training.train(
            f"{__name__}:Raw", settings, RunOptions(tracking="off"), output=tmp_path / f"{virtual_ranks}"
        )
        found.append(torch.load(trained.model_path, weights_only=True))
    plain, exact = found
    for name, weight in plain.items():
        torch.testing.assert_close(exact[name], weight, rtol=1e-4, atol=1e-6 if name.startswith("1") else 0)


class Counter(nn.Module):
    """Counts in a buffer, which it replaces."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features):
        if self.training:
            self.calls = self.calls + 1
        return features * (1 + self.calls / 100)


class Counting(Sound):
    body = Counter


def test_a_buffer_that_forward_replaces_moves_once_per_step_in_however_many_parts(alone, tmp_path):
    settings = Settings(epochs=2, batch_size=6, virtual_ranks=3)
    trained = training.train(f"{__name__}:Counting", settings, RunOptions(tracking="off"), output=tmp_path)
    assert torch.load(trained.model_path, weights_only=True)["1.calls"] == 2 * SIZE / 6


class Nudged(ImageClassifier):
    """Of which each rank draws first weights that differ by rounding, as on processors of different kinds."""

    def model(self):
        model = super().model()
        for weight in model.parameters():
            weight.data *= 1 + 2.0**-22 * distributed.get_rank()
        return model


@pytest.mark.kernels
def test_the_average_too_begins_with_rank_0s_weights(train):
    settings = {"recipe": f"{__name__}:Nudged", "train_fraction": 16 / 318, "ema_decay": 0.9, "virtual_ranks": 3}
    assert identical(*(train(nproc, name=f"{nproc}", **settings) for nproc in (1, 3)))


@pytest.mark.kernels
def test_a_run_that_was_cut_off_goes_on_with_other_numbers_of_ranks_to_the_same_bits(train, whole):
    chosen = {"validation_fraction": 0.1, "evaluations_per_epoch": 2, "patience": 3, "keep_best": 1}
    settings = {"epochs": 2, "log_interval": 1, "virtual_ranks": 4, **chosen, **BATCH_NORM}
    expected = whole(1, **settings)
    for nproc, step in ((3, 3), (1, 7)):
        with pytest.raises(Unplugged):
            train(nproc, name="cut", checkpoint_seconds=0, on_event=unplug_at(step), **settings)
    resumed = train(2, name="cut", checkpoint_seconds=0, target=TWO_HOSTS, **settings)
    assert isinstance(resumed.events[0], RunStarted)
    assert (resumed.events[0].first_epoch, resumed.events[0].first_step) > (0, 3)
    assert identical(expected, resumed)


def test_what_is_not_finite_is_named_with_its_rank(train):
    # The first step has three forward passes, and in the eighth on rank 1 a gradient is NaN
    with pytest.raises(RankError, match=r"NonFiniteError: gradient is not finite in epoch 1, step 6, on rank 1"):
        train(3, target="tests.launch.targets:break_gradient_of_rank_one", checkpoint_seconds=0, virtual_ranks=3)


def test_parts_that_do_not_go_evenly_are_said_with_what_it_costs(train):
    (started, *_) = train(3, virtual_ranks=4, epochs=1).events
    assert isinstance(started, RunStarted)
    (remark,) = (remark for remark in started.remarks if "3 ranks compute 4 parts" in remark)
    assert "1.50 times" in remark
    assert "train on 4 or 2 ranks, by nproc, or set virtual_ranks to a multiple of 3" in remark


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"virtual_ranks": -1}, "virtual_ranks must be at least 0, got -1"),
        ({"virtual_ranks": 2.5}, "virtual_ranks must be a whole number, got 2.5"),
        ({"virtual_ranks": 17}, r"virtual_ranks must be at most batch_size \(16\).*, got 17: lower it, or raise batch"),
    ],
)
def test_numbers_that_cannot_be_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        Hyperparameters(batch_size=16, **settings)


def test_more_ranks_than_virtual_ones_are_refused_with_both_remedies(train):
    with pytest.raises(InputError, match=r"virtual_ranks must be at least the number of ranks \(3\), got 2: raise it"):
        train(3, virtual_ranks=2)


def test_what_cannot_be_done_by_parts_is_refused_before_data_are_read(alone, tmp_path):
    with pytest.raises(InputError, match=r"virtual_ranks must be 0 for Fitted, .* got 2: give micro_batch a number"):
        training.train(
            f"{__name__}:Fitted", replace(Settings(), virtual_ranks=2), RunOptions(tracking="off"), output=tmp_path
        )


class Fitted(Sound):
    micro_batch = -1

    def data(self, split):
        raise AssertionError("refused before data are read")


@pytest.mark.slow
def test_a_steps_threads_are_one_unless_they_are_set(train):
    found = {threads: train(1, name=f"{threads}", virtual_ranks=2, threads=threads) for threads in (0, 1)}
    assert all(torch.equal(weight, found[1].weights[name]) for name, weight in found[0].weights.items())


@pytest.mark.kernels
def test_equal_bytes_in_random_configurations(tmp_path):
    """How many, DDP_TEST_CONFIGURATIONS says: 240 take a quarter of an hour, for which -o faulthandler_timeout=3600."""
    count = int(os.environ.get("DDP_TEST_CONFIGURATIONS", 2))
    subject = make_subject(find_code("tests.engine.virtual_ranks.configurations:Chosen"), settings_of(0))
    job, world = job_in(tmp_path, subject, RunOptions(loader_workers=0)), World(max(RANKS), max(RANKS), "gloo", "cpu")
    digests = []
    for first in range(0, count, AT_ONCE):
        asked = job, range(first, min(first + AT_ONCE, count)), str(tmp_path)
        target = "tests.engine.virtual_ranks.configurations:train_all"
        digests += launcher.launch(target, world, asked, 600, print)[0]
    assert len(digests) == count
    assert {number: found for number, found in enumerate(digests) if len({*found.values()}) > 1} == {}
