"""What the engine promises: the result depends on the hyperparameters alone."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flyte_ddp.engine.checkpoints.checkpoint import read_checkpoint
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.events import CheckpointWritten, GradientsSeen, NotLearning, StepLogged
from flyte_ddp.launch.failures import RankError
from flyte_ddp.recipes import models
from flyte_ddp.recipes.hyperparameters import MODELS, Hyperparameters
from flyte_ddp.recipes.images import ImageClassifier
from flyte_ddp.recipes.models import build_model, load_model
from tests.small_training import identical, relative_difference


@pytest.mark.kernels
def test_one_two_and_three_ranks_give_the_same_weights(train):
    # Six steps: after some more, rounding has moved a value over a kink, and is amplified
    one, two, three = (train(nproc, name=f"{nproc}", train_fraction=94 / 318) for nproc in (1, 2, 3))
    assert one.events[0].steps_per_epoch == 6
    for other in (two, three):
        assert relative_difference(one, other) < 1e-5
        assert other.result.epochs[0].train["accuracy"] == one.result.epochs[0].train["accuracy"]
        assert other.result.epochs[0].test["loss"] == pytest.approx(one.result.epochs[0].test["loss"], rel=1e-4)


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(train):
    first, again, other = train(name="a"), train(name="b"), train(name="c", seed=2**32 - 1)
    assert identical(first, again)
    assert not identical(first, other)


@pytest.mark.parametrize("virtual_ranks", [0, 2])
def test_a_default_type_that_a_model_leaves_behind_changes_no_bit(train, whole, virtual_ranks):
    # In bfloat16 301 is 300, by which the gradients would be divided
    settings = {"model": "fashion_cnn", "batch_size": 301, "clip_norm": 1.0, "virtual_ranks": virtual_ranks}
    left = train(recipe="tests.engine.dtype_recipes:LeavesHalf", **settings)
    assert identical(left, whole(**settings))


@pytest.mark.kernels
def test_a_last_batch_with_fewer_images_than_ranks(train):
    # 318 = 317 + 1: in the last step all ranks but one have nothing to do
    one, three = (train(nproc, name=f"{nproc}", batch_size=317, learning_rate=0.1) for nproc in (1, 3))
    assert relative_difference(one, three) < 1e-5


@pytest.mark.kernels
def test_augmentation_and_averaged_weights_do_not_depend_on_the_ranks_either(train):
    settings = {"shift_pixels": 2, "flip": True, "train_fraction": 0.5, "label_smoothing": 0.1, "ema_decay": 0.9}
    one, two, plain = train(1, name="1", **settings), train(2, name="2", **settings), train(1, name="plain")
    assert relative_difference(one, two) < 1e-5
    assert relative_difference(one, plain) > 1e-3


def test_every_model_can_be_asked_for():
    assert set(models.MODELS) == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_every_shape(model):
    for shape in ((1, 28, 28), (3, 32, 32), (3, 20, 24)):
        network = build_model(model, 1, shape, 7).eval()
        scores = network(torch.zeros(2, *shape))
        assert scores.shape == (2, 7)
        weights = build_model(model, 1, shape, 7).state_dict()
        assert all(torch.equal(weight, weights[name]) for name, weight in network.state_dict().items())


@pytest.mark.kernels
def test_the_tutorials_recipe(train):
    recipe = {"schedule": "constant", "learning_rate": 0.01, "sgd_momentum": 0.5, "nesterov": False}
    trained = train(weight_decay=0.0, epochs=2, **recipe)
    rates = {event.learning_rate for event in trained.events if isinstance(event, StepLogged)}
    assert rates == {0.01}
    assert trained.result.epochs[1].train["loss"] < trained.result.epochs[0].train["loss"]


@pytest.mark.kernels
def test_the_model_file_gives_exactly_the_reported_accuracy(train, small_data, tmp_path):
    trained = train(epochs=4)
    model = load_model(tmp_path / "training" / "model.pt")
    recipe = ImageClassifier(Hyperparameters(), small_data)
    recipe.model()
    images, labels = recipe.data("test")
    accuracy = (recipe.forward(model, (images, labels)).argmax(1) == labels).float().mean()
    assert float(accuracy) == pytest.approx(trained.result.epochs[-1].test["accuracy"])
    assert accuracy > 0.8
    assert not any(name.startswith("module.") for name in trained.weights)


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(train, tmp_path):

    with pytest.raises(RankError, match=r"NonFiniteError: loss is not finite in epoch 1, step \d+") as failed:
        train(learning_rate=1e20, checkpoint_seconds=0)
    assert failed.value.failure.recoverable is False
    saved = read_checkpoint(tmp_path / "training" / "checkpoint", {})["state"]
    assert all(torch.isfinite(weight).all() for weight in saved["model"].values())


def test_a_gradient_that_is_not_finite_ends_all_ranks_before_the_step(train, tmp_path):

    with pytest.raises(RankError) as failed:
        train(3, target="tests.launch.targets:break_gradient_of_rank_one", checkpoint_seconds=0)
    assert "NonFiniteError: gradient is not finite in epoch 1, step 8, on rank 1: lower learning_rate" in str(
        failed.value
    )
    assert failed.value.failure.recoverable is False
    saved = read_checkpoint(tmp_path / "training" / "checkpoint", {})["state"]
    assert saved["progress"]["step"] == 7
    assert all(torch.isfinite(weight).all() for weight in saved["model"].values())


def test_a_host_that_is_ahead_of_its_device_gives_the_same(train, whole):
    expected = whole(2, epochs=2)
    trained = train(2, epochs=2, log_interval=1000, target="tests.launch.targets:behind", checkpoint_seconds=0)
    assert identical(expected, trained)
    written = [(event.epoch, event.step) for event in trained.events if isinstance(event, CheckpointWritten)]
    assert sum(epoch == 0 for epoch, _ in written) >= 4, "however rarely steps are logged"


def test_a_request_to_stop_is_obeyed_by_all_ranks_in_the_same_step_however_rarely_steps_are_logged(train, whole):
    stopped = train(2, epochs=2, log_interval=1000, target="tests.launch.targets:stop_while_behind", name="cut")
    assert stopped == [(0, 11)] * 2, "it went along with step 8, which is looked at three steps later"
    resumed = train(2, epochs=2, log_interval=1000, name="cut")
    assert (resumed.events[0].first_epoch, resumed.events[0].first_step) == (0, 11)
    assert identical(whole(2, epochs=2), resumed)


def test_a_bad_step_is_found_before_a_checkpoint_has_what_came_after_it(train, tmp_path):

    target = "tests.launch.targets:break_gradient_while_behind"
    with pytest.raises(RankError, match="NonFiniteError: gradient is not finite in epoch 1, step 8, on rank 1"):
        train(2, target=target, checkpoint_seconds=0, log_interval=1000)
    assert read_checkpoint(tmp_path / "training" / "checkpoint", {})["state"]["progress"]["step"] < 8


@pytest.mark.kernels
def test_a_training_that_diverges_says_so_and_ends_all_the_same(train):
    trained = train(learning_rate=0.5, clip_norm=0.0, epochs=2)
    warnings = [event for event in trained.events if isinstance(event, NotLearning)]
    assert warnings == trained.result.warnings
    (guessing,) = [warning for warning in warnings if "no better than guessing after epoch 1" in warning.reason]
    assert (guessing.epoch, guessing.step) == (0, 20)
    assert "2.303 for predictions that are the same for all samples: lower learning_rate" in guessing.reason
    assert train(learning_rate=0.5, clip_norm=0.0, epochs=2).result.warnings == warnings  # resumed


@pytest.mark.kernels
def test_a_sound_training_has_no_warnings(train):
    assert train(epochs=3).result.warnings == []


def test_a_batch_beyond_the_training_split_makes_a_warning(train):
    """And one as large as that none; neither learns much."""
    whole, more = (train(1, name=f"{size}", batch_size=size, epochs=1) for size in (318, 319))
    assert not [warning for warning in whole.result.warnings if "batch_size" in warning.reason]
    (warning,) = (warning for warning in more.result.warnings if "batch_size" in warning.reason)
    assert "batch_size is 319, but an epoch has no more than 318 training images" in warning.reason
    assert warning in more.events


def test_a_gradient_is_shortened_to_the_norm(train):
    free, long, short = (train(name=f"{norm}", clip_norm=norm, weight_decay=0.0) for norm in (0.0, 1e9, 1e-9))
    assert identical(free, long)
    initial = build_model("mnist_cnn", 1, (1, 16, 16), 10).state_dict()
    assert all(torch.allclose(weight, initial[name], atol=1e-4) for name, weight in short.weights.items())


def test_losses_and_accuracies_are_those_of_the_whole_epoch(train):
    trained = train(3, log_interval=7)
    logged = [event for event in trained.events if isinstance(event, StepLogged)]
    assert [event.step for event in logged] == [7, 14, 20]
    samples = [7 * 16, 7 * 16, 318 - 14 * 16]
    mean = sum(event.measures["loss"] * n for event, n in zip(logged, samples, strict=True)) / 318
    epoch = trained.result.epochs[0]
    assert mean == pytest.approx(epoch.train["loss"])
    assert all(0 < event.gradient_norm < math.inf for event in logged)
    assert not any(isinstance(event, GradientsSeen) for event in trained.events)  # only on request


@pytest.mark.parametrize("gradient", [[1.0, 1.0 + 2**-23], [1e-45, 3e-45], [2.0, 2.0], [-3e38, 3e38], []])
def test_any_gradient_has_a_histogram(gradient):
    state: Any = SimpleNamespace(_is_left_out=False, _gradients=lambda: (["weight"], [torch.tensor(gradient)]))
    counts, edges = TrainingState.gradient_histograms(state)["weight"]
    assert sum(counts) == len(gradient)
    assert all(math.isfinite(edge) for edge in edges)


def test_what_a_step_costs_is_counted(train):
    """m outputs of k inputs take 2 m k operations each, and twice as many going back: for inputs and weights."""
    result = train(1, model="mnist_cnn").result
    first, second = 2 * (12 * 12 * 20) * (5 * 5), 2 * (2 * 2 * 50) * (5 * 5 * 20)
    dense = 2 * 500 * 50 + 2 * 10 * 500
    assert result.parameters == 56_080
    assert result.sample_flops == 2 * first + 3 * (second + dense)  # the images themselves need no gradient
