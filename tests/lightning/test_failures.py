"""Trainings under Lightning that fail, or are refused, each with its cause."""

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch.failures import RankError
from tests.lightning.project import settings, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("project")]


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


def test_a_state_that_a_checkpoint_cannot_hold_is_refused_before_the_first_step(tmp_path):
    seen: list[Event] = []
    with pytest.raises(InputError, match=r"cannot hold state\['callbacks'\]\['History'\]\['losses'\], of type ndarray"):
        train(tmp_path / "run", settings(), "numerals.variants:Remembering", on_event=seen.append)
    assert not [event for event in seen if isinstance(event, StepLogged)]
