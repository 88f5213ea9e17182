"""What would fail in the first step, after an epoch or at the very end is refused before training, or works."""

import re
from typing import Any

import numpy as np
import pytest

from flyte_ddp.engine.attributes import check_attributes
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine import late_recipes
from tests.engine.probe_recipes import Settings, Sound

REFUSED = {
    "Insisting": ["Insisting.measure", "paired with other samples", "other samples)", "define constant_loss()"],
    "PredictingBfloat16": ["PredictingBfloat16.predictions", "BFloat16", "float()"],
    "PredictingOne": ["PredictingOne.predictions", "a row for each of the 12 samples, got ()"],
    "PredictingAList": ["PredictingAList.predictions", "a row for each of the 12 samples, got list"],
    "FlatPictures": ["FlatPictures.pictures", "(C, H, W)", "got shape (8,)"],
    "Sparse": ["Sparse.model", "the gradient of 0.weight must not be sparse", "sparse=False"],
    "LBFGS": ["LBFGS.optimizer", "LBFGS cannot make a step (TypeError", "needs no closure"],
    "SparseAdam": ["SparseAdam.optimizer", "SparseAdam cannot make a step (RuntimeError", "dense gradients"],
    "TwoOptimizers": ["TwoOptimizers.optimizer", "must return one optimizer of torch.optim, got list", "groups"],
    "LearnedWeights": ["LearnedWeights.measure", "the weights of 'loss' must not need a gradient", "detach()"],
    "Lazy": ["Lazy.model", "0.weight has no shape yet", "call the network once in model()"],
    "NamedArrays": ["NamedArrays.data", "must be numbers, got str192"],
}
SOUND = [
    "MixedOutputs", "InsistingWithConstantLoss", "Trimmed", "Predicting", "PredictingBools", "LearnedWeightsElsewhere",
    "LazyButCalled",
]  # fmt: skip


def run(name, output, nproc=0, loader_workers=0):
    options = RunOptions(nproc=nproc, loader_workers=loader_workers, tracking="off")
    return train(f"tests.engine.late_recipes:{name}", Settings(epochs=2), options, output=output)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_fail_later_is_refused_at_once(alone, tmp_path, name):
    with pytest.raises(InputError) as caught:
        run(name, tmp_path)
    message = caught.value.message
    assert all(words in message for words in REFUSED[name]), message
    assert re.search(r"_recipes.py, line \d+", message), message


@pytest.mark.parametrize("name", SOUND)
def test_what_only_looks_like_it_is_trained(alone, tmp_path, name):
    assert len(run(name, tmp_path).epochs) == 2


def test_a_dataset_with_strings_in_its_samples_is_refused(alone, tmp_path):
    with pytest.raises(DataError, match=r"NamedRows: samples must be numbers, got str: leave it out, or encode it"):
        run("NamedSamples", tmp_path)


def test_predictions_of_types_that_no_backend_adds_up_come_from_all_ranks(tmp_path):
    run("Predicting", tmp_path, nproc=2)
    predictions = np.load(tmp_path / "predictions.npy")
    assert (predictions.dtype, predictions.shape) == (np.int16, (12, 8))
    assert predictions.any(1).all()


def test_every_recipe_of_the_module_is_tested():
    kinds = [kind for kind in vars(late_recipes).values() if isinstance(kind, type) and issubclass(kind, Sound)]
    recipes = {kind.__name__ for kind in kinds if kind.__module__ == late_recipes.__name__}
    assert recipes - {*REFUSED, *SOUND} == {"NamedSamples"}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("clip_norm", -1, "at least 0, got -1"),
        ("clip_norm", float("nan"), "a number, got NaN"),
        ("ema_decay", 1.5, "at least 0 and below 1, got 1.5"),
        ("micro_batch", -2, "at least -1, got -2"),
        ("micro_batch", 2.5, "a whole number, got 2.5"),
        ("passes_per_epoch", 0, "at least 1, got 0"),
        ("passes_per_epoch", 1.5, "a whole number, got 1.5"),
        ("train_fraction", 2, "above 0 and at most 1, got 2"),
        ("couples_samples", "yes", 'true or false, got "yes"'),
        ("percent", "accuracy", "a tuple of names, such as (\"accuracy\",), got 'accuracy'"),
    ],
)
def test_an_attribute_that_breaks_its_rule_is_refused(name, value, rule):
    recipe = Sound(Settings())
    setattr(recipe, name, value)
    with pytest.raises(InputError, match=re.escape(f"Sound.{name} must be {rule}")):
        check_attributes(recipe)


def test_attributes_may_be_numbers_of_numpy():
    recipe: Any = Sound(Settings())
    recipe.ema_decay, recipe.micro_batch = np.float64(0.9), np.int64(4)
    check_attributes(recipe)
