"""Trainings under Lightning by real ranks: the project in docs/lightning.md, and variants of it."""

import json
import math
import os
import signal
from importlib import import_module
from typing import Any

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.events import (
    CheckpointWritten,
    EpochChosen,
    EpochFinished,
    NotLearning,
    RanksTimed,
    RunStarted,
    StepLogged,
)
from flyte_ddp.launch.failures import PreemptedError, RankError
from tests.commands import same
from tests.lightning.project import train, write_project

pytestmark = pytest.mark.slow


class KilledError(Exception):
    """Ends the parent, and so all ranks by SIGKILL."""


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    with pytest.MonkeyPatch.context() as here:
        here.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def whole(project, tmp_path_factory):
    """An undisturbed training."""
    return train(tmp_path_factory.mktemp("whole"), settings())


def settings(**values):
    kind = import_module("numerals.settings").Settings
    return kind(**{"epochs": 3, "width": 16, **values})


def at_checkpoint(number, do):
    """Does something when the checkpoint of this number, from 1, has been written."""
    seen = []

    def on_event(event):
        seen.extend([event] * isinstance(event, CheckpointWritten))
        if len(seen) == number and isinstance(event, CheckpointWritten):
            do()

    return on_event


def kill():
    raise KilledError


def of(kind, trained):
    return [event for event in trained.events if isinstance(event, kind)]


def test_a_killed_training_ends_with_the_same_bits_with_shuffling_dropout_and_a_schedule(tmp_path, whole):
    for epochs in (1, 3):
        with pytest.raises(KilledError):
            train(tmp_path / f"after-{epochs}", settings(), on_event=at_checkpoint(epochs, kill))
        resumed = train(tmp_path / f"after-{epochs}", settings())
        assert [event.first_epoch for event in of(RunStarted, resumed)] == [epochs]
        assert same(resumed.weights, whole.weights)
        assert resumed.result.tested == whole.result.tested
        for ours, theirs in zip(resumed.result.epochs, whole.result.epochs, strict=True):
            assert (ours.train, ours.validation) == (theirs.train, theirs.validation)


def test_a_host_without_the_checkpoint_is_sent_it(tmp_path, whole):
    two: Any = {"target": "tests.lightning.targets:on_two_hosts"}
    with pytest.raises(KilledError):
        train(tmp_path / "killed", settings(), on_event=at_checkpoint(2, kill), **two)
    resumed = train(tmp_path / "killed", settings(), **two)
    assert [event.first_epoch for event in of(RunStarted, resumed)] == [2]
    assert same(resumed.weights, whole.weights)


def test_a_loader_with_a_state_goes_on_within_an_epoch_also_after_a_stop_on_request(tmp_path):
    one: Any = {"data": "numerals.variants:Resumable", "nproc": 1}
    whole = train(tmp_path / "whole", settings(), **one)

    def stop(event):
        if isinstance(event, RunStarted):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError, match="stopped on request before epoch 1, step 11"):
        train(tmp_path / "stopped", settings(), on_event=stop, **one)
    with pytest.raises(KilledError):
        train(tmp_path / "stopped", settings(), on_event=at_checkpoint(12, kill), checkpoint_seconds=0, **one)
    resumed = train(tmp_path / "stopped", settings(), **one)
    (started,) = of(RunStarted, resumed)
    assert started.first_epoch == 1
    assert started.first_step > 0
    assert same(resumed.weights, whole.weights)
    assert [epoch.train["loss"] for epoch in resumed.result.epochs] == [
        epoch.train["loss"] for epoch in whole.result.epochs
    ]


def test_the_parent_is_told_what_the_module_logs(tmp_path):
    trained = train(tmp_path / "run", settings(limit_train_batches=25, log_interval=10))
    (started,), (chosen,) = of(RunStarted, trained), of(EpochChosen, trained)
    assert (started.train_samples, started.validation_samples, started.steps_per_epoch) == (1258, 270, 25)
    assert [event.step for event in of(StepLogged, trained)] == [10, 20, 25] * 3
    assert [event.samples for event in of(EpochFinished, trained)] == [800] * 3
    for epoch in of(EpochFinished, trained):
        assert epoch.train.keys() == epoch.validation.keys() == {"loss", "accuracy"}
        assert epoch.train["loss"] != epoch.validation["loss"]
    assert chosen.measures == trained.result.tested
    assert 0.5 < trained.result.tested["accuracy"] <= 1
    assert not chosen.is_best
    rates = [event.learning_rate for event in of(StepLogged, trained)][2::3]
    assert rates == pytest.approx([3e-3, 2.7e-3, 2.43e-3])


def test_a_callback_of_the_module_ends_the_training_and_its_data_are_split_as_before_for_the_test(tmp_path):
    trained = train(tmp_path / "run", settings(epochs=9), "numerals.variants:Stopping", "numerals.variants:Drawn")
    (chosen,) = of(EpochChosen, trained)
    assert chosen.stopped_early
    assert (chosen.epoch, len(trained.result.epochs)) == (1, 2)


def test_a_module_that_optimizes_by_itself_and_never_validates_is_trained(tmp_path):
    trained = train(tmp_path / "run", settings(epochs=1), "numerals.variants:ByHand")
    (epoch,) = trained.result.epochs
    assert epoch.validation == {}
    assert math.isnan(epoch.train["loss"])
    assert trained.result.tested["accuracy"] > 0.5


def test_ranks_draw_the_same_orders_and_splits_and_their_own_numbers_in_steps(tmp_path):
    trained = train(tmp_path / "run", settings(epochs=2), "numerals.variants:Seen", "numerals.variants:InTwo")
    seen = [json.loads((tmp_path / "run" / "logs" / f"seen-{rank}").read_text()) for rank in range(2)]
    orders = []
    for split, count in {"train": 30, "validation 0": 24, "validation 1": 16}.items():
        for epoch in range(2):
            mine, others = (
                [index for *which, batch, _ in of_rank for index in batch if which == [split, epoch]]
                for of_rank in seen
            )
            assert len({*mine, *others}) == len(mine + others) == count, split
            orders.append(mine)
    assert orders[0] != orders[1], "each epoch has its own"
    drawn = [number for of_rank in seen for *_, number in of_rank]
    assert len({*drawn}) == len(drawn)
    assert trained.result.epochs[0].train["forked"] == 1, "a worker that imports torch anew costs seconds"
    times = of(RanksTimed, trained)[-1]
    assert len(times.data) == 2
    assert min(times.data) > 0
    reasons = [warning.reason for warning in trained.result.warnings]
    assert any(
        "loss is not shown for the validation, which logs loss/dataloader_idx_0" in reason for reason in reasons
    ), reasons


def seen_by(folder, *split):
    """What each rank has seen and drawn in these splits and epochs."""
    ranks = [json.loads((folder / "logs" / f"seen-{rank}").read_text()) for rank in range(2)]
    return [[one for one in rank if (one[0].split()[0], one[1]) in split] for rank in ranks]


@pytest.mark.parametrize("data", ["InTwo", "Sampled", "Shuffled"])
def test_after_a_resume_samples_that_are_drawn_are_those_of_an_undisturbed_training(tmp_path, data):
    of_two: Any = {
        "settings": settings(epochs=2),
        "module": "numerals.variants:Seen",
        "data": f"numerals.variants:{data}",
    }
    train(tmp_path / "whole", **of_two)
    with pytest.raises(KilledError):
        train(tmp_path / "killed", **of_two, on_event=at_checkpoint(1, kill))
    train(tmp_path / "killed", **of_two)
    second = ("train", 1), ("validation", 1)
    assert seen_by(tmp_path / "killed", *second) == seen_by(tmp_path / "whole", *second)


def test_what_a_sampler_of_the_users_draws_is_dealt_out(tmp_path):
    train(tmp_path, settings(epochs=2), "numerals.variants:Seen", "numerals.variants:Sampled")
    epochs = [
        [index for rank in seen_by(tmp_path, ("train", epoch)) for *_, batch, _ in rank for index in batch]
        for epoch in (0, 1)
    ]
    assert [len(epoch) for epoch in epochs] == [60, 60]
    assert max(epochs[0] + epochs[1]) < 20
    assert sorted(epochs[0]) != sorted(epochs[1])


def test_ranks_that_see_the_same_samples_are_named_and_a_sampler_that_is_ignored_is_refused(tmp_path):
    trained = train(
        tmp_path, settings(epochs=1, limit_train_batches=3), "numerals.variants:Seen", "numerals.variants:ForEachRank"
    )
    assert any(warning.reason.startswith("ranks 0, 1 see the same samples") for warning in trained.result.warnings)
    with pytest.raises(
        InputError, match=r"Ignored.train_dataloader must have .*RandomSampler\(replacement=True, num_s"
    ):
        train(tmp_path / "ignored", settings(), data="numerals.variants:Ignored")


def test_checkpoints_of_the_modules_own_are_lightnings(tmp_path):
    whole = train(tmp_path / "whole", settings(), "numerals.variants:Keeping")
    assert len(of(CheckpointWritten, whole)) == 3
    with pytest.raises(KilledError):
        train(tmp_path / "killed", settings(), "numerals.variants:Keeping", on_event=at_checkpoint(1, kill))
    resumed = train(tmp_path / "killed", settings(), "numerals.variants:Keeping")
    assert same(resumed.weights, whole.weights)
    best = import_module("numerals.variants").Keeping.load_from_checkpoint(tmp_path / "whole" / "logs" / "best.ckpt")
    assert best.hparams.width == 16


def test_data_without_a_test_split_and_a_headline_that_is_not_logged(tmp_path):
    trained = train(tmp_path / "run", settings(epochs=1), data="numerals.variants:WithoutTest", headline="acuracy")
    assert trained.result.tested == {}
    (warning,) = trained.result.warnings
    assert warning.reason.startswith("headline must be a measure that the module logs: accuracy, loss, got 'acuracy'")
    assert of(NotLearning, trained) == [warning]


# --- failures ---


def test_several_optimizers_without_manual_optimization_are_refused_in_lightnings_words(tmp_path):
    with pytest.raises(RankError, match="only supported with manual optimization"):
        train(tmp_path / "run", settings(), "numerals.variants:TwoOptimizers", nproc=1)


def test_a_failure_names_the_rank_and_the_cause(tmp_path):
    with pytest.raises(RankError) as raised:
        train(tmp_path / "run", settings(), "numerals.variants:Failing")
    assert "rank 1" in str(raised.value).partition("\n")[0]
    assert "no such label" in str(raised.value)


def test_a_loss_that_is_not_finite_ends_the_run_at_the_next_look(tmp_path):
    with pytest.raises(RankError, match="loss is not finite in epoch 1, step 20, on rank 0, 1"):
        train(tmp_path / "run", settings(), "numerals.variants:Diverging")
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("Broken", "a weight is not finite in epoch 1, step 40, on rank 0, 1"),
        ("BrokenInValidation", "the loss on the validation split is nan after epoch 1, although"),
        ("BrokenInTest", "the loss on the test split is nan after epoch 1, although"),
    ],
)
def test_what_is_not_finite_ends_the_run_wherever_it_shows(tmp_path, module, words):
    with pytest.raises(RankError, match=f"NonFiniteError: {words}"):
        train(tmp_path / "run", settings(epochs=1), f"numerals.variants:{module}")
    assert not (tmp_path / "run" / "model.pt").exists()


@pytest.mark.parametrize(
    ("module", "data", "values", "words"),
    [
        ("model:nn", "model:Numerals", {}, "numerals.model:nn must be a subclass of lightning.pytorch.LightningModule"),
        ("model:Numerals", "model:Numerals", {}, "must be a subclass of lightning.pytorch.LightningModule"),
        ("variants:Depth", "model:Numerals", {}, "Depth.__init__ needs depth, and Settings has no such field: add one"),
        (
            "variants:Scaled",
            "model:Numerals",
            {},
            "Settings.learning_rate must be a parameter of __init__, by this name, in Scaled and Numerals",
        ),
        ("model:LitNumerals", "variants:WithoutTraining", {}, "WithoutTraining must define train_dataloader"),
        ("model:LitNumerals", "variants:WithoutLength", {}, "train_dataloader has no length: set limit_train_batches"),
        ("model:LitNumerals", "variants:WithoutBatches", {}, "WithoutBatches: train_dataloader must have a batch for"),
        ("model:LitNumerals", "model:Numerals", {"limit_train_batches": 0.001}, "Try at least `limit_train_batches="),
        (
            "variants:WithoutOptimizer",
            "model:Numerals",
            {},
            "Lightning cannot train numerals.variants:Without",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(tmp_path, module, data, values, words):
    with pytest.raises(InputError) as raised:
        train(tmp_path / "run", settings(**values), f"numerals.{module}", f"numerals.{data}", nproc=1)
    assert words in raised.value.message


def test_data_without_a_length_are_trained_on_for_as_many_batches_as_are_asked_for(tmp_path):
    trained = train(
        tmp_path / "run",
        settings(limit_train_batches=15, limit_val_batches=0, limit_test_batches=0, epochs=1),
        data="numerals.variants:WithoutLength",
        nproc=1,
    )
    assert [event.step for event in of(StepLogged, trained)] == [10, 15]
