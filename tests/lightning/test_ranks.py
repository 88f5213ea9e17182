"""Trainings under Lightning by real ranks: the project in docs/lightning.md, and variants of it."""

import math
import shutil
from importlib import import_module
from typing import Any

import pytest
import torch

from flyte_ddp.events import CheckpointWritten, EpochChosen, EpochFinished, NotLearning, RunStarted, StepLogged
from flyte_ddp.report.words import split_sizes
from tests.commands import free_port, same
from tests.lightning.project import KilledError, at_checkpoint, kill, of, settings, train
from tests.pod import TWO_NODES
from tests.programs import run_on_two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("project")]


@pytest.fixture(scope="module")
def whole(project, tmp_path_factory):
    """An undisturbed training."""
    return train(tmp_path_factory.mktemp("whole"), few_steps())


def few_steps() -> Any:
    return settings(limit_train_batches=10)


def test_a_host_without_the_checkpoint_is_sent_it(tmp_path, whole):
    two: Any = {"target": "tests.lightning.targets:on_two_hosts"}
    with pytest.raises(KilledError):
        train(tmp_path / "killed", few_steps(), on_event=at_checkpoint(2, kill), **two)
    resumed = train(tmp_path / "killed", few_steps(), **two)
    assert [event.first_epoch for event in of(RunStarted, resumed)] == [2]
    assert same(resumed.weights, whole.weights)


AS_RANK = """
from flytekit import task
from flyte_ddp import LightningOptions, LightningTraining
from numerals.settings import Settings
training = LightningTraining("numerals.model:LitNumerals", data="numerals.model:Numerals")
@task
def train() -> str:
    settings = Settings(epochs=3, width=16, limit_train_batches=10)
    outputs = training.run_as_rank(settings, LightningOptions(tracking="off"))
    return outputs.model_state.path if outputs else ""
print(train())
"""


def test_on_two_nodes_it_is_as_on_one(project, tmp_path, whole):
    """Each is a process with the variables that torchrun sets, a core and folders of its own."""
    (tmp_path / "node.py").write_text(AS_RANK)
    own = [{**TWO_NODES, "DDP_RUNS_DIR": str(tmp_path / rank)} for rank in ("0", "1")]
    model, nothing = run_on_two_nodes(tmp_path / "node.py", free_port(), nodes=own)
    assert [model.error, nothing.error, nothing.printed.strip()] == ["", "", ""]
    assert same(torch.load(model.printed.strip(), weights_only=True), whole.weights)


def test_a_loader_with_a_state_goes_on_within_an_epoch(tmp_path):
    one: Any = {"data": "numerals.loaders:Resumable", "nproc": 1}
    whole = train(tmp_path / "whole", few_steps(), **one)

    with pytest.raises(KilledError):
        train(tmp_path / "stopped", few_steps(), on_event=at_checkpoint(12, kill), checkpoint_seconds=0, **one)
    resumed = train(tmp_path / "stopped", few_steps(), **one)
    (started,) = of(RunStarted, resumed)
    assert started.first_epoch == 1
    assert started.first_step > 0
    assert same(resumed.weights, whole.weights)
    assert [epoch.train["loss"] for epoch in resumed.result.epochs] == [
        epoch.train["loss"] for epoch in whole.result.epochs
    ]


def test_ranks_whose_weights_drift_apart_are_told_of_once(tmp_path, whole):
    (warning,) = train(tmp_path, few_steps(), "numerals.variants:FineTuned").result.warnings
    assert warning.reason.startswith("the ranks have other weights than one another")
    assert not whole.result.warnings


def test_what_callbacks_set_up_for_an_epoch_is_there_after_a_resume_within_it(tmp_path):
    one: Any = {"module": "numerals.variants:Accumulating", "data": "numerals.loaders:Resumable", "nproc": 1}
    short = settings(batch_size=64, log_interval=3)
    whole = train(tmp_path / "whole", short, **one)
    with pytest.raises(KilledError):
        train(tmp_path / "cut", short, on_event=at_checkpoint(1, kill), checkpoint_seconds=0, **one)
    resumed = train(tmp_path / "cut", short, **one)
    (started,) = of(RunStarted, resumed)
    assert (started.first_epoch, started.first_step % 3) == (0, 0)
    assert started.first_step > 0
    assert same(resumed.weights, whole.weights)


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
    trained = train(tmp_path / "run", settings(epochs=9), "numerals.variants:Stopping", "numerals.loaders:Drawn")
    (chosen,) = of(EpochChosen, trained)
    assert chosen.stopped_early
    assert (chosen.epoch, len(trained.result.epochs)) == (1, 2)


def test_callbacks_of_a_function_are_the_trainers_beside_the_modules_own(tmp_path):
    trained = train(
        tmp_path / "run", settings(epochs=9), "numerals.variants:Keeping", callbacks="numerals.variants:of_trainer"
    )
    assert len(trained.result.epochs) == 2, "patience is 1"
    assert (tmp_path / "run" / "logs" / "best.ckpt").exists()


def test_an_epoch_that_ends_before_its_last_batch_has_all_its_steps_and_no_others(tmp_path):
    trained = train(tmp_path / "run", settings(log_interval=10), "numerals.variants:Hurried")
    assert [(event.epoch, event.step) for event in of(StepLogged, trained)] == [(0, 10), (0, 15), (1, 5)]
    assert [epoch.samples for epoch in trained.result.epochs] == [480, 160]
    assert all(math.isfinite(epoch.train["loss"]) for epoch in trained.result.epochs)


def test_what_has_stopped_early_does_not_go_on_after_a_kill(tmp_path):
    stopping: Any = {"module": "numerals.variants:Stopping", "nproc": 1}
    with pytest.raises(KilledError):
        train(tmp_path, settings(epochs=9), on_event=at_checkpoint(2, kill), **stopping)
    resumed = train(tmp_path, settings(epochs=9), **stopping)
    assert [event.first_epoch for event in of(RunStarted, resumed)] == [2]
    assert len(resumed.result.epochs) == 2


def test_a_module_that_optimizes_by_itself_and_never_validates_is_trained(tmp_path):
    trained = train(tmp_path / "run", settings(epochs=1), "numerals.variants:ByHand")
    (epoch,) = trained.result.epochs
    assert epoch.validation == {}
    assert math.isnan(epoch.train["loss"])
    assert trained.result.tested["accuracy"] > 0.5


def test_a_module_that_returns_the_loss_of_each_sample_has_their_mean(tmp_path):
    trained = train(tmp_path / "run", settings(epochs=1), "numerals.variants:OfEachSample", nproc=1)
    assert 1.5 < trained.result.epochs[0].train["loss"] < 2.5  # ten classes begin at 2.3


def test_a_killed_training_ends_with_the_same_bits_and_keeps_its_modelcheckpoint_in_logs_of_another_place(tmp_path):
    """With shuffling, dropout and a schedule, on three ranks, among which the order of a sum matters."""
    keeping: Any = {"settings": few_steps(), "module": "numerals.variants:KeepingFirst", "nproc": 3}
    whole = train(tmp_path / "whole", **keeping)
    assert len(of(CheckpointWritten, whole)) == 3
    with pytest.raises(KilledError):
        train(tmp_path / "killed", on_event=at_checkpoint(1, kill), **keeping)
    shutil.rmtree(tmp_path / "killed" / "logs")
    resumed = train((tmp_path / "killed").rename(tmp_path / "resumed"), **keeping)
    assert [event.first_epoch for event in of(RunStarted, resumed)] == [1]
    assert resumed.result.tested == whole.result.tested
    for ours, theirs in zip(resumed.result.epochs, whole.result.epochs, strict=True):
        assert (ours.train, ours.validation) == (theirs.train, theirs.validation)
    (best,) = (tmp_path / "resumed" / "logs" / "kept").iterdir()
    undisturbed = torch.load(tmp_path / "whole" / "logs" / "kept" / "epoch=0.ckpt", weights_only=True)
    assert best.name == "epoch=0.ckpt"
    assert same(resumed.weights, whole.weights)
    assert import_module("numerals.variants").KeepingFirst.load_from_checkpoint(best).hparams.width == 16
    assert same(torch.load(best, weights_only=True)["state_dict"], undisturbed["state_dict"])


def test_data_without_a_test_split_and_a_headline_that_is_not_logged(tmp_path):
    trained = train(tmp_path / "run", settings(epochs=1), data="numerals.loaders:WithoutTest", headline="acuracy")
    assert trained.result.tested == {}
    (warning,) = trained.result.warnings
    assert warning.reason.startswith("headline must be a measure that the module logs: accuracy, loss, got 'acuracy'")
    assert of(NotLearning, trained) == [warning]


def test_a_validation_without_a_batch_and_an_epoch_that_a_callback_adds_are_said(tmp_path):
    trained = train(
        tmp_path / "run", settings(epochs=2), "numerals.variants:Averaging", "numerals.loaders:WithoutValidation"
    )
    (started,) = of(RunStarted, trained)
    assert started.epochs == len(of(EpochFinished, trained)) == 3
    assert any(warning.reason.startswith("nothing is validated") for warning in trained.result.warnings)


def test_data_without_a_length_are_trained_on_for_as_many_batches_as_are_asked_for(tmp_path):
    trained = train(
        tmp_path / "run",
        settings(limit_train_batches=15, limit_val_batches=0, limit_test_batches=0, epochs=1),
        data="numerals.loaders:WithoutLength",
        nproc=1,
    )
    assert [event.step for event in of(StepLogged, trained)] == [10, 15]
    assert split_sizes(of(RunStarted, trained)[0]) == "an unknown number of training samples"
