"""Under Lightning, a training that is killed anywhere and resumed ends with the bits of an undisturbed one."""

import itertools
import shutil
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, RunStarted, StepLogged
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.lightning.remedies import _count_steps
from tests.commands import same
from tests.lightning.project import KilledError, Trained, at_checkpoint, kill, of, settings, train

STEPS = {"Persistent": 6, "Generated": 7, "Bucketed": 23, "Cycled": 7}  # in an epoch


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("project")]


class Scheduled(BoringModel):
    def __init__(self, frequency: int):
        super().__init__()
        self.frequency = frequency

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": self.frequency}]


def whole_and_resumed(folder, *numbers, nproc=2, **of_it: Any) -> tuple[Trained, ...]:
    """An undisturbed training, which writes a checkpoint in each step; then one from the checkpoint of each number.

    What a kill leaves is the last checkpoint. In test_ranks.py the ranks are killed.
    """
    written = itertools.count(1)

    def copy(event):
        if isinstance(event, CheckpointWritten) and (number := next(written)) in numbers:
            (folder / str(number)).mkdir()
            shutil.copy(folder / "whole" / "checkpoint", folder / str(number))

    whole = train(folder / "whole", on_event=copy, checkpoint_seconds=0, nproc=nproc, **of_it)
    return whole, *(train(folder / str(number), nproc=nproc, **of_it) for number in numbers)


def check_same(resumed: Trained, whole: Trained) -> None:
    assert same(resumed.weights, whole.weights)
    for found, expected in zip(resumed.result.epochs, whole.result.epochs, strict=True):
        assert (found.train, found.validation, found.digest) == (expected.train, expected.validation, expected.digest)
    logged = {(one.epoch, one.step): one.measures["loss"] for one in of(StepLogged, whole)}
    assert all(one.measures["loss"] == logged[one.epoch, one.step] for one in of(StepLogged, resumed))


@pytest.mark.parametrize(
    ("data", "nproc"),
    [
        ("Persistent", 2),
        ("Generated", 2),
        ("Bucketed", 1),
        ("Cycled", 2),
    ],
)
def test_plain_loaders_go_on_within_an_epoch(tmp_path, data, nproc):
    of_it: Any = {
        "settings": settings(epochs=2, log_interval=4),
        "module": "numerals.variants:OfAllLoaders",
        "data": f"numerals.loaders:{data}",
        "nproc": nproc,
    }
    whole, resumed = whole_and_resumed(tmp_path, STEPS[data] + 2, **of_it)
    (started,) = of(RunStarted, resumed)
    assert started.first_epoch == 1
    assert started.first_step >= 2
    assert started.steps_per_epoch == of(RunStarted, whole)[0].steps_per_epoch == STEPS[data]
    check_same(resumed, whole)


@pytest.mark.parametrize(
    ("module", "phase", "said", "begins"),
    [
        ("Noticed", "step 4", "before epoch 1, step 5", (0, 4)),
        ("Judged", "validation 2", "in the evaluation after epoch 1, step 10, with which", (0, 10)),
        ("Listing", "validation 2", "before epoch 2, step 1", (1, 0)),  # the epoch's end needs what steps have left
        ("Swapping", "validation 2", "before epoch 2, step 1", (1, 0)),  # its weights are not those of the step
        ("Ending", "test 2", "in the evaluation after epoch 2, with which a resume begins", (2, 0)),
        ("EndingSmoothed", "test 2", "in the evaluation after epoch 2, with which a resume begins", (2, 0)),
        ("EndingNormalized", "test 2", "in the evaluation after epoch 3, with which a resume begins", (3, 0)),
    ],
)
def test_a_notice_is_obeyed_at_once(tmp_path, monkeypatch, module, phase, said, begins):
    of_it: Any = {
        "settings": settings(epochs=2, log_interval=1000, limit_train_batches=10),
        "module": f"numerals.variants:{module}",
        "data": "numerals.loaders:Evaluated",
        "nproc": 2 if module in ("Noticed", "Judged") else 1,
    }
    whole = train(tmp_path / "whole", **of_it)
    monkeypatch.setenv("NUMERALS_NOTICE", phase)
    with pytest.raises(PreemptedError, match=f"stopped on request {said}"):
        train(tmp_path / "stopped", **of_it)
    monkeypatch.delenv("NUMERALS_NOTICE")
    resumed = train(tmp_path / "stopped", **of_it)
    assert [(one.first_epoch, one.first_step) for one in of(RunStarted, resumed)] == [begins]
    check_same(resumed, whole)
    assert resumed.result.tested == whole.result.tested


def test_after_a_notice_in_a_validation_another_number_of_ranks_begins_with_it(tmp_path, monkeypatch):
    of_it: Any = {
        "settings": settings(epochs=2, log_interval=1),
        "module": "numerals.variants:Noticed",
        "data": "numerals.loaders:Evaluated",
    }
    monkeypatch.setenv("NUMERALS_NOTICE", "validation 2")
    with pytest.raises(PreemptedError, match="in the evaluation after epoch 1"):
        train(tmp_path / "stopped", **of_it)
    monkeypatch.delenv("NUMERALS_NOTICE")
    resumed = train(tmp_path / "stopped", nproc=1, **of_it)
    (started,) = of(RunStarted, resumed)
    assert (started.first_epoch, started.first_step) == (0, started.steps_per_epoch)
    steps = [(one.epoch, one.step) for one in of(StepLogged, resumed)]
    assert steps == [(1, step) for step in range(1, started.steps_per_epoch + 1)]
    assert all(one.validation for one in resumed.result.epochs)


@pytest.mark.parametrize("module", ["AddingUp", "AddingUpApart"])
def test_gradients_that_no_optimizer_has_stepped_by_are_not_lost(tmp_path, module):
    few = settings(epochs=1, log_interval=3, limit_train_batches=10)
    whole, resumed = whole_and_resumed(tmp_path, 3, settings=few, module=f"numerals.variants:{module}")
    (started,) = of(RunStarted, resumed)
    assert started.first_step % 2 == 0 or not module.endswith("Apart")
    check_same(resumed, whole)


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("EachEpoch", {"callbacks": "numerals.variants:counting"}),
        ("Decaying", {"callbacks": "numerals.variants:averaging"}),
    ],
)
def test_what_sets_up_an_epoch_is_called_again_and_weights_are_those_of_the_checkpoint(tmp_path, module, more):
    few = settings(epochs=2, limit_train_batches=10)
    whole, resumed = whole_and_resumed(
        tmp_path, 15, settings=few, module=f"numerals.variants:{module}", nproc=1, **more
    )
    assert of(RunStarted, resumed)[0].first_epoch == 1
    assert of(RunStarted, resumed)[0].first_step >= 5
    check_same(resumed, whole)


def test_hooks_of_a_start_set_what_they_set_in_an_undisturbed_training(tmp_path):
    few = settings(epochs=2, limit_train_batches=6)
    of_it: Any = {"settings": few, "module": "numerals.variants:Started", "data": "numerals.loaders:Paced", "nproc": 1}
    of_it["callbacks"] = "numerals.variants:beginning"
    whole, *others = whole_and_resumed(tmp_path, 9, 6, 12, **of_it)
    for epoch, resumed in zip((1, 1, 2), others, strict=True):
        assert of(RunStarted, resumed)[0].first_epoch == epoch
        check_same(resumed, whole)


@pytest.mark.parametrize("module", ["FineTuned", "Averaging"])
def test_callbacks_of_lightnings_go_on_within_an_epoch(tmp_path, module):
    of_it: Any = {"settings": settings(epochs=3, batch_size=64, limit_train_batches=8), "nproc": 1}
    whole, resumed = whole_and_resumed(tmp_path, 12, module=f"numerals.variants:{module}", **of_it)
    assert of(RunStarted, resumed)[0].first_epoch == 1
    assert of(RunStarted, resumed)[0].first_step > 0
    check_same(resumed, whole)


def test_a_checkpoint_waits_for_gradients_that_are_being_added_up(tmp_path):
    added_up = settings(epochs=1, accumulate_grad_batches=3, limit_train_batches=15)
    whole, resumed = whole_and_resumed(tmp_path, 2, settings=added_up, nproc=1)
    assert of(RunStarted, resumed)[0].first_step % 3 == 0
    check_same(resumed, whole)


def test_a_schedule_that_ends_too_early_on_fewer_ranks_is_refused_and_the_checkpoint_kept(tmp_path):
    of_it: Any = {"settings": settings(epochs=2), "module": "numerals.variants:OneCycle"}
    whole = train(tmp_path / "whole", **of_it)
    with pytest.raises(KilledError):
        train(tmp_path / "killed", on_event=at_checkpoint(1, kill), **of_it)
    with pytest.raises(InputError, match=r"OneCycleLR.total_steps is 80, of which 40 .* resume on 2 ranks, or train"):
        train(tmp_path / "killed", nproc=1, **of_it)
    check_same(train(tmp_path / "killed", **of_it), whole)


@pytest.mark.parametrize(("frequency", "accumulated"), [(1, 1), (2, 1), (2, 2), (3, 2), (1, 2)])
def test_steps_of_a_schedule_are_counted_as_lightning_takes_them(tmp_path, frequency, accumulated):
    module = Scheduled(frequency)
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, limit_train_batches=5, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulated, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module)
    (config,) = trainer.lr_scheduler_configs
    assert 3 * _count_steps(trainer, frequency, 0) == config.scheduler.last_epoch


def test_within_an_epoch_another_number_of_ranks_goes_on_with_the_samples_that_are_left(tmp_path):
    of_it: Any = {"settings": settings(epochs=1), "data": "numerals.loaders:Plain"}
    with pytest.raises(KilledError):
        train(tmp_path / "killed", on_event=at_checkpoint(3, kill), checkpoint_seconds=0, **of_it)
    resumed = train(tmp_path / "killed", nproc=1, **of_it)
    (started,) = of(RunStarted, resumed)
    assert started.first_step >= 6
    assert started.first_step % 2 == 0
    assert of(StepLogged, resumed)[-1].step == started.steps_per_epoch == 13
    with pytest.raises(KilledError):
        train(tmp_path / "early", on_event=at_checkpoint(1, kill), checkpoint_seconds=0, nproc=1, **of_it)
    resumed = train(tmp_path / "early", **of_it)
    (started,) = of(RunStarted, resumed)
    assert started.first_step >= 1
    assert of(StepLogged, resumed)[-1].step == started.steps_per_epoch


@pytest.mark.parametrize(("data", "what"), [("Streamed", "DataLoader of Stream"), ("ReadAhead", "Ahead of Augmented")])
def test_data_without_a_state_begin_epochs_anew_and_say_so_at_the_start(tmp_path, data, what):
    of_it: Any = {"settings": settings(epochs=2), "data": f"numerals.loaders:{data}", "nproc": 1}
    trained = train(tmp_path / "run", checkpoint_seconds=0, **of_it)
    assert [(one.epoch, one.step) for one in of(CheckpointWritten, trained)] == [(1, 0), (2, 0)]
    (warning,) = trained.result.warnings
    assert warning.reason.startswith(f"{data}.train_dataloader returns a {what}, which has no state")
    assert trained.events.index(warning) < trained.events.index(of(StepLogged, trained)[0])


def test_a_sampler_that_draws_from_a_generator_of_its_own_is_refused_with_what_to_write(tmp_path):
    with pytest.raises(InputError, match=r"Secret must not .* __iter__ with self.rng = numpy.random.default_rng\("):
        train(tmp_path, settings(), data="numerals.loaders:Secretive", nproc=1)


def test_a_dataset_with_a_generator_of_its_own_is_warned_of_with_what_to_call(tmp_path):
    trained = train(tmp_path, settings(epochs=1), data="numerals.loaders:Keeping", nproc=1)
    (warning,) = trained.result.warnings
    assert "Holding has a random number generator of its own" in warning.reason
    assert "call self.rng = numpy.random.default_rng(" in warning.reason
