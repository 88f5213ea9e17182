"""A training that begins with another one's weights, or where another one has ended; and layers that stay."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flyte_ddp.engine.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from flyte_ddp.engine.checkpoints.warm_start import freeze, load_init_weights, matching
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, EpochFinished, RunStarted, StepLogged
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train as train_recipe
from tests.engine.measure_recipes import Scored
from tests.engine.optimizer_recipes import CountingInItsGroup, Remembering
from tests.engine.probe_recipes import Settings, Sound
from tests.small_training import Unplugged, differences, identical

CONSTANT = {"schedule": "constant", "learning_rate": 0.05}


def started(trained):
    return next(event for event in trained.events if isinstance(event, RunStarted))


# --- training on ---


class Slowing(Sound):
    """Has what a continuation has to bring along: momentum, rates that fall, an average."""

    ema_decay = 0.9

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def lr_lambda(self, step, total_steps):
        return 1 / (1 + step)


@pytest.mark.parametrize("position", [(0, 2), (1, 0)])
def test_a_continuation_with_the_same_settings_ends_as_the_whole_training(alone, tmp_path, position):
    def copy(event):
        if isinstance(event, CheckpointWritten) and (event.epoch, event.step) == position:
            shutil.copy(tmp_path / "whole" / "checkpoint", tmp_path / "init")

    settings = Settings(epochs=2, batch_size=4, skip_spikes=6)
    options = RunOptions(keep_checkpoint=True, checkpoint_seconds=0)
    train_recipe(Slowing, settings, options, output=tmp_path / "whole", on_event=copy)
    train_recipe(Slowing, settings, options, output=tmp_path / "on", init=tmp_path / "init")
    whole, on = (read_checkpoint(tmp_path / name / "final-checkpoint", {})["state"] for name in ("whole", "on"))
    parts = "model", "average", "optimizer", "schedule", "spikes"
    assert not differences(*({part: state[part] for part in parts} for state in (whole, on)))
    measured = [[(epoch["train"], epoch["test"]) for epoch in state["progress"]["history"]] for state in (whole, on)]
    assert measured[0] == measured[1]


@pytest.mark.slow
def test_two_and_three_epochs_equal_five_bit_for_bit(train, whole, tmp_path):
    more = {"ema_decay": 0.9, "validation_fraction": 0.2, "patience": 3, "nesterov": False}
    settings = {**CONSTANT, **more}
    expected = whole(epochs=5, **settings)
    train(name="first", epochs=2, **settings)
    on = train(name="second", epochs=5, init=tmp_path / "first" / "final-checkpoint", **settings)
    assert (started(on).first_epoch, started(on).first_step) == (2, 0)
    assert started(on).remarks == ["Continues from final-checkpoint, after epoch 2"]
    assert [event.epoch for event in on.events if isinstance(event, EpochFinished)] == [2, 3, 4]
    assert identical(expected, on)
    assert on.result.chosen_epoch == expected.result.chosen_epoch


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"ema_decay": 0.9, "shift_pixels": 1, "validation_fraction": 0.2},
        {"validation_fraction": 0.2, "patience": 2, "minimum_delta": 0.9},  # which ends it after three epochs
    ],
)
def test_a_training_that_stops_on_the_way_goes_on_with_the_same_bits(train, whole, tmp_path, more):
    expected = whole(epochs=5, **more)
    first = train(name="first", epochs=5, stop_after=1, **more)
    assert started(first).epochs == len(first.result.epochs) == 1
    middle = train(name="middle", epochs=5, stop_after=4, init=tmp_path / "first" / "final-checkpoint", **more)
    assert started(middle).remarks == ["Continues from final-checkpoint, after epoch 1"]
    last = train(name="last", epochs=5, init=tmp_path / "middle" / "final-checkpoint", **more)
    assert len(last.result.epochs) == (3 if "patience" in more else 5)
    assert identical(expected, last)
    assert last.result.tested == expected.result.tested
    assert last.result.chosen_epoch == expected.result.chosen_epoch


@pytest.mark.slow
def test_a_continuation_that_is_cut_off_goes_on_with_the_same_bits(train, whole, tmp_path):
    train(name="first", epochs=1, **CONSTANT)
    settings = {**CONSTANT, "epochs": 3, "init": tmp_path / "first" / "final-checkpoint", "log_interval": 5}
    expected = whole(**settings)

    def unplug(event):
        if isinstance(event, StepLogged) and (event.epoch, event.step) == (2, 10):
            raise Unplugged

    with pytest.raises(Unplugged):
        train(name="cut", checkpoint_seconds=0, on_event=unplug, **settings)
    resumed = train(name="cut", **settings)
    assert started(resumed).first_epoch in (1, 2)
    assert not [event for event in resumed.events if isinstance(event, EpochFinished) and event.epoch == 0]
    assert identical(expected, resumed)


def test_a_checkpoint_from_within_an_epoch_goes_on_with_the_same_settings_alone(train, whole, tmp_path):
    def unplug(event):
        if isinstance(event, StepLogged) and event.step == 10:
            raise Unplugged

    settings = {**CONSTANT, "log_interval": 5, "virtual_ranks": 2}
    expected = whole(1, epochs=2, **settings)
    with pytest.raises(Unplugged):
        train(1, name="cut", epochs=1, checkpoint_seconds=0, on_event=unplug, **settings)
    init = tmp_path / "cut" / "checkpoint"
    on = train(2, name="on", epochs=2, init=init, **settings)
    assert started(on).first_step > 0
    assert identical(expected, on)
    with pytest.raises(InputError, match=r"within an epoch, .* but these differ: batch_size, learning_rate"):
        train(1, name="other", epochs=2, init=init, **{**settings, "learning_rate": 0.1, "batch_size": 32})
    content = read_checkpoint(init, {})
    content["state"]["progress"]["names"] = ["loss", "error"]
    write_checkpoint(init, content)
    with pytest.raises(InputError, match=r"needs the same measures: it has loss, error, and this training loss, accur"):
        train(1, name="other", epochs=2, init=init, **settings)


def test_a_continuation_has_its_own_rates(train, tmp_path):
    train(1, name="first", epochs=1, **CONSTANT)
    init = tmp_path / "first" / "final-checkpoint"
    on = train(1, name="on", epochs=2, init=init, schedule="constant", learning_rate=0.01)
    assert {event.learning_rate for event in on.events if isinstance(event, StepLogged)} == {0.01}
    with pytest.raises(InputError, match=r"epochs must be above 1, because it includes the epochs of init, got 1"):
        train(1, name="none", epochs=1, init=init, **CONSTANT)
    with pytest.raises(InputError, match=r"stop_after must be above 1, because it includes the epochs of init, got 1"):
        train(1, name="none", epochs=2, stop_after=1, init=init, **CONSTANT)
    with pytest.raises(InputError, match=r"init_leave_out must be empty where init is a checkpoint, .*, got 'fc2'"):
        train(1, name="none", epochs=2, init=init, init_leave_out="fc2", **CONSTANT)
    with pytest.raises(
        InputError,
        match=r"init must fit the network, got .*final-checkpoint with missing keys norm1.b.*shapes conv1.w",
    ):
        train(1, name="other", epochs=2, init=init, model="fashion_cnn", **CONSTANT)


@pytest.mark.parametrize("recipe", [CountingInItsGroup, Remembering])
def test_what_an_optimizer_counts_in_its_groups_or_beside_its_state_goes_on(alone, tmp_path, recipe):
    options = RunOptions(nproc=0, tracking="off", keep_checkpoint=True)
    settings = Settings(epochs=2)
    expected = train_recipe(recipe, settings, options, output=tmp_path / "whole")
    train_recipe(recipe, replace(settings, stop_after=1), options, output=tmp_path / "first")
    init = tmp_path / "first" / "final-checkpoint"
    assert train_recipe(recipe, settings, options, output=tmp_path / "on", init=init).digest == expected.digest


@pytest.mark.parametrize(
    "edited",
    [
        {"higher_is_better": (), "lower_is_better": ("score",)},
        {"headline": "other", "higher_is_better": ("score", "other")},
    ],
)
def test_a_best_epoch_that_was_chosen_by_another_measure_is_forgotten(alone, tmp_path, monkeypatch, edited):
    settings = Settings(epochs=1, patience=1)
    options = RunOptions(nproc=0, tracking="off", keep_checkpoint=True)

    def train_on(name, epochs, init=None):
        events: list[Any] = []
        result = train_recipe(
            Scored, replace(settings, epochs=epochs), options, output=tmp_path / name, init=init, on_event=events.append
        )
        return result, [remark for event in events if isinstance(event, RunStarted) for remark in event.remarks]

    train_on("first", 1)
    init = tmp_path / "first" / "final-checkpoint"
    same, remarks = train_on("same", 3, init)
    assert (same.best_epoch, len(same.epochs), remarks[-1]) == (1, 2, "Continues from final-checkpoint, after epoch 1")
    for name, value in edited.items():
        monkeypatch.setattr(Scored, name, value)
    on, remarks = train_on("on", 3, init)
    assert on.best_epoch == (2 if "headline" in edited else 3), "higher others are better, and they fall"
    assert len(on.epochs) == 3
    assert remarks[-1].endswith(
        "after epoch 1: the best epoch so far is forgotten, because it was chosen by another "
        "measure or on other samples"
    )


class Guessing(Sound):
    """Its data are the loss of guessing."""

    def constant_loss(self):
        return float(self.data_path.read_text())


def test_losses_on_other_data_are_not_compared_with(alone, tmp_path):
    options = RunOptions(nproc=0, tracking="off", keep_checkpoint=True)

    def train_on(name, loss, epochs, init=None):
        (tmp_path / "data").write_text(loss)
        train_recipe(
            Guessing, Settings(epochs=epochs), options, data=tmp_path / "data", output=tmp_path / name, init=init
        )
        state = read_checkpoint(tmp_path / name / "final-checkpoint", {})["state"]
        return state["progress"]["watch"]

    first = train_on("first", "1e-3", 1)
    assert "no better than guessing" in first["warnings"][0]["reason"]
    init = tmp_path / "first" / "final-checkpoint"
    assert train_on("same", "1e-3", 2, init)["warnings"] == first["warnings"]
    other = train_on("other", "2e-3", 2, init)
    assert other["constant_loss"] == 2e-3
    assert "and 0.002 for predictions that are the same" in other["warnings"][1]["reason"]


def test_a_checkpoint_of_another_format_is_refused_in_a_sentence(alone, tmp_path):
    options = RunOptions(nproc=0, tracking="off", keep_checkpoint=True)
    train_recipe(Scored, Settings(), options, output=tmp_path / "first")
    init = tmp_path / "first" / "final-checkpoint"
    content = read_checkpoint(init, {})
    for name in ("measure", "is_lower_better"):
        del content["state"]["choice"][name]
    write_checkpoint(init, {**content, "format": 8})
    with pytest.raises(InputError, match=r"init: the checkpoint .*final-checkpoint has format 8, this version reads 9"):
        train_recipe(Scored, Settings(epochs=2), options, output=tmp_path / "on", init=init)


def test_another_recipes_checkpoint_is_refused(train, tmp_path):
    train(1, name="first")
    init = tmp_path / "first" / "final-checkpoint"
    with pytest.raises(InputError, match=r"belongs to another training: its recipe was .*ImageClassifier"):
        train_recipe("tests.engine.probe_recipes:Sound", Settings(), RunOptions(nproc=1), output=tmp_path, init=init)


# --- beginning with weights ---


def test_a_training_begins_with_anothers_weights_and_a_new_head_while_frozen_layers_stay(train, tmp_path):
    small = {"model": "fashion_cnn", "train_fraction": 0.25}
    first = train(1, name="first", **small)
    init = tmp_path / "first" / "model.pt"
    settings = {**small, "seed": 2, "freeze": "conv1, norm1, *2.weight", "init_leave_out": "fc2"}
    one, two = (train(nproc, name=f"{nproc}", init=init, virtual_ranks=2, **settings) for nproc in (1, 2))
    assert identical(one, two)
    assert started(one).remarks == [
        "Starts from 14 of 16 tensors of model.pt; newly initialised: fc2.weight, fc2.bias",
        "Frozen: conv1.weight, norm1.weight, norm1.bias, conv2.weight, norm2.weight, fc2.weight",
    ]
    same = {name for name, weight in one.weights.items() if torch.equal(weight, first.weights[name])}
    stays = {"conv1.weight", "norm1.weight", "norm1.bias", "conv2.weight", "norm2.weight"}
    assert same == stays | {f"norm1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    plain = train(1, name="plain", init=init, **small, learning_rate=1e-9)
    assert started(plain).remarks == ["Starts from 16 of 16 tensors of model.pt"]
    assert torch.allclose(plain.weights["fc1.weight"], first.weights["fc1.weight"], atol=1e-6)


def test_weights_that_do_not_fit_are_refused_or_left_out(tmp_path):
    path, given = tmp_path / "model.pt", nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    torch.save({**given.state_dict(), "spare": torch.zeros(1)}, path)
    own = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(InputError) as refused:
        load_init_weights(own, path, "")
    assert str(refused.value) == (
        f"init must fit the network, got {path} with unexpected keys spare; wrong shapes 1.bias (5,) instead of (2,), "
        "1.weight (5, 3) instead of (2, 3): to leave such tensors out, set init_leave_out to their names, as "
        '"1", or to "mismatching"'
    )
    for leave_out in ("mismatching", "1 spare", "1.*,spare"):
        taken, said = load_init_weights(own, path, leave_out)
        assert taken == {"0.weight", "0.bias"}
        assert said == "Starts from 2 of 4 tensors of model.pt; newly initialised: 1.weight, 1.bias"
        assert torch.equal(own.state_dict()["0.weight"], given.state_dict()["0.weight"])
    with pytest.raises(InputError, match="init_leave_out must leave some tensors of init"):
        load_init_weights(own, path, "*")
    torch.save(nn.DataParallel(own).state_dict(), path)
    with pytest.raises(
        InputError, match=r"unexpected keys module\.0\.bias, .*: rename its tensors, before which a wrapper"
    ):
        load_init_weights(own, path, "")


def test_what_to_leave_out_of_nothing_is_refused(tmp_path):
    settings = Settings(init_leave_out="fc2")
    with pytest.raises(InputError, match="init_leave_out must be empty without init, got 'fc2'"):
        train_recipe("tests.engine.probe_recipes:Sound", settings, RunOptions(nproc=1), output=tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"init must be a file or folder that is there, got .*nowhere.pt"):
        train_recipe("tests.engine.probe_recipes:Sound", Settings(), output=tmp_path, init=tmp_path / "nowhere.pt")


# --- names ---


def test_a_pattern_fits_tensors_and_layers():
    names = ["body.0.weight", "body.0.bias", "body.10.weight", "head.weight"]
    assert matching("freeze", ["body.0"], names) == names[:2]
    assert matching("freeze", ["body"], names) == names[:3]
    assert matching("freeze", ["*.weight", "body.0.*"], names) == names
    with pytest.raises(InputError, match=r"freeze must match names of tensors, got 'neck': choose from body.0.weight"):
        matching("freeze", ["body", "neck"], names)


def test_what_leaves_nothing_to_train_is_refused(train):
    with pytest.raises(InputError, match=r"no gradient comes from .* leave some parameters trainable"):
        train(1, freeze="*")


def test_frozen_parameters_need_no_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert freeze(model, "0") == "Frozen: 0.weight, 0.bias"
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]


@pytest.mark.parametrize("is_affine", [True, False])
def test_batch_norm_in_frozen_layers_keeps_its_statistics_also_without_parameters(is_affine):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=is_affine)), nn.BatchNorm1d(2))
    freeze(model, "0")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()(torch.randn(4, 2))
    assert {name for name, buffer in model.named_buffers() if torch.equal(buffer, before[name])} == {
        "0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked"
    }  # fmt: skip
