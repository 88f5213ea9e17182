"""Trainings under Lightning that fail, or are refused, each with its cause."""

import re
from dataclasses import dataclass

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch.failures import RankError
from flyte_ddp.lightning.settings import LightningSettings
from tests.lightning.project import KilledError, at_checkpoint, kill, settings, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("project")]


def test_several_optimizers_without_manual_optimization_are_refused_in_lightnings_words(tmp_path):
    with pytest.raises(RankError, match="only supported with manual optimization"):
        train(tmp_path / "run", settings(), "numerals.variants:TwoOptimizers", nproc=1)


def test_a_failure_names_the_rank_and_the_cause(tmp_path):
    with pytest.raises(RankError) as raised:
        train(tmp_path / "run", settings(), "numerals.variants:Failing")
    assert "rank 1" in str(raised.value).partition("\n")[0]
    assert "no such label" in str(raised.value)


def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(tmp_path):
    with pytest.raises(RankError, match="loss is not finite in epoch 1, step 13, on rank 0, 1"):
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
        ("variants:Searching", "model:Numerals", {}, "must not have a LearningRateFinder: it searches anew when"),
        ("variants:Spiking", "model:Numerals", {}, "must not have a SpikeDetection: Lightning cannot load its state"),
        ("variants:Depth", "model:Numerals", {}, "Depth needs depth, and Settings has no such field: add one"),
        (
            "variants:Scaled",
            "model:Numerals",
            {},
            "Settings.learning_rate must be a parameter, by this name, of Scaled and Numerals",
        ),
        ("model:LitNumerals", "loaders:WithoutTraining", {}, "WithoutTraining must define train_dataloader"),
        (
            "model:LitNumerals",
            "loaders:WithoutLength",
            {},
            "train_dataloader has no length: set limit_train_batches",
        ),
        (
            "model:LitNumerals",
            "loaders:WithoutBatches",
            {},
            "WithoutBatches: train_dataloader must have a batch for",
        ),
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


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        ("pruning", "must not have a ModelPruning: its masks are not in Lightning's"),
        ("a_name", "numerals.variants:a_name must return a list of lightning.pytorch.Callback"),
    ],
)
def test_callbacks_that_cannot_be_used_are_refused_with_the_remedy(tmp_path, callbacks, words):
    with pytest.raises(InputError) as raised:
        train(tmp_path / "run", settings(), callbacks=f"numerals.variants:{callbacks}", nproc=1)
    assert words in raised.value.message


def test_a_state_that_a_checkpoint_cannot_hold_is_refused_before_the_first_step(tmp_path):
    seen: list[Event] = []
    with pytest.raises(InputError, match=r"cannot hold state\['callbacks'\]\['History'\]\['losses'\], of type ndarray"):
        train(tmp_path / "run", settings(), "numerals.variants:Remembering", on_event=seen.append)
    assert not [event for event in seen if isinstance(event, StepLogged)]


def test_what_resumes_on_another_number_of_ranks_says_so(tmp_path):
    said = r"goes on on 1 rank from a checkpoint of 2 ranks: .* resume on 2 ranks, .*{\"resume\": false}"
    with pytest.raises(KilledError):
        train(tmp_path, settings(epochs=2), on_event=at_checkpoint(1, kill))
    (warning,) = train(tmp_path, settings(epochs=2), nproc=1).result.warnings
    assert re.search(said, warning.reason)


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        ("variants:PartlyUnused", "model:Numerals", 'as an option: --options \'{"strategy": "ddp_find_unused_param'),
        (
            "model:LitNumerals",
            "loaders:OwnBatches",
            "derive the batch sampler from torch.utils.data.BatchSampler",
        ),
    ],
)
def test_an_error_of_lightnings_has_the_remedy_that_there_is_here(tmp_path, module, data, words):
    with pytest.raises(InputError) as raised:
        train(tmp_path / "run", settings(), f"numerals.{module}", f"numerals.{data}")
    assert words in raised.value.message


@dataclass(frozen=True)
class Numerals(LightningSettings):
    batch_size: int = 16
    width: int = 8
    learning_rate: float = 0.1


@dataclass(frozen=True)
class Long(Numerals):
    max_epochs: int = 9


def test_a_setting_that_is_an_argument_of_the_trainer_is_refused_with_what_it_is_here(tmp_path):
    words = "Long.max_epochs must be .* of this name is epochs of LightningSettings here: remove the field"
    with pytest.raises(InputError, match=words):
        train(tmp_path / "run", Long(), nproc=1)
