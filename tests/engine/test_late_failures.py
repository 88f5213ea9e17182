"""What would fail in the first step, after an epoch or at the very end is refused before training, or works."""

import re
from typing import Any

import numpy as np
import pytest

from flyte_ddp.engine.attributes import check_attributes
from flyte_ddp.errors import InputError
from flyte_ddp.events import RunStarted
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
    "PicturesOfNumPy": ["PicturesOfNumPy.pictures", "tensors (C, H, W)", "got ndarray"],
    "PredictingWords": ["PredictingWords.predictions", "the same shape for all batches, got (3,) and (4,)", "pad them"],
    "Sparse": ["Sparse.model", "the gradient of 0.weight must not be sparse", "sparse=False"],
    "LBFGS": ["LBFGS.optimizer", "LBFGS cannot make a step (TypeError", "needs no closure"],
    "SparseAdam": ["SparseAdam.optimizer", "SparseAdam cannot make a step (RuntimeError", "dense gradients"],
    "TwoOptimizers": ["TwoOptimizers.optimizer", "must return one optimizer of torch.optim, got list", "groups"],
    "LearnedWeights": ["LearnedWeights.measure", "the weights of 'loss' must not need a gradient", "detach()"],
    "OfNumPy": ["OfNumPy.data", "shape (8, 8) in a batch is float64", "Double", '.astype("float32")'],
    "Halved": ["Halved.data", "shape (8, 8) in a batch is float16", "Half", '.astype("float32")'],
    "Bytes": ["Bytes.data", "shape (8, 8) in a batch is uint8", "Byte", ".float()"],
    "Lazy": ["Lazy.model", "0.weight has no shape yet", "call the network once in model()"],
    "Scripted": ["Scripted.model", "the network must not come from torch.jit, or must be frozen", "return the module"],
    "InGraphs": ["InGraphs.model", "must not be compiled into CUDA graphs", "max-autotune-no-cudagraphs"],
    "LayerInGraphs": ["LayerInGraphs.model", "0 must not be compiled into CUDA graphs"],
    "ForwardInGraphs": ["ForwardInGraphs.model", "0 must not be compiled into CUDA graphs"],
    "NoNetwork": ["NoNetwork.model", "must return the network, an nn.Module, got NoneType"],
    "NoOutputs": ["NoOutputs.forward", "must return the network's outputs, got None"],
    "NoFactor": ["NoFactor.lr_lambda", "must return a finite number, got None"],
    "FactorOfText": ["FactorOfText.lr_lambda", "must return a finite number, got '0.5'"],
    "FactorNaN": ["FactorNaN.lr_lambda", "must return a finite number, got nan"],
    "LossOfText": ["LossOfText.constant_loss", "must return a finite number, got 'unknown'"],
    "NoMeasure": ["NoMeasure must define measure(outputs, batch)"],
    "NoModel": ["NoModel must define model()"],
    "NoData": ["NoData must define data(split)"],
    "NoArguments": ["NoArguments.__init__", "must take settings and data_path", "too many positional arguments"],
    "NumberedMeasure": ["NumberedMeasure.measure", "names of measures must be strings, got 5"],
    "NoPictures": ["NoPictures.pictures", "returns no pairs of a caption and an image", "return () for none"],
    "FactsOfTuples": ["FactsOfTuples.facts", "must return what JSON can hold", "keys must be str"],
    "NoFacts": ["NoFacts.facts", "must return a dict, got NoneType"],
    "OtherWeights": ["OtherWeights.optimizer", "the network's parameters, got one of shape (8, 8) that is none"],
    "ComplexWeights": ["1.turns is complex64", "keep torch.view_as_real of it as the parameter"],
    "FrozenNumbers": ["1.numbers is int8, but what is frozen must be", "register_buffer() it instead"],
}
SOUND = [
    "MixedOutputs", "InsistingWithConstantLoss", "Trimmed", "Predicting", "PredictingBools", "LearnedWeightsElsewhere",
    "LazyButCalled", "FactorTensor", "FactorUntilTheEnd", "OwnNetwork",
    "InPlace", "YieldingPictures", "FrozenScripted", "Normalised", "Compiled",
    "WithAFunction", "SometimesNothing",
]  # fmt: skip


def run(name, output, nproc=0, loader_workers=0, on_event=None):
    options = RunOptions(nproc=nproc, loader_workers=loader_workers, tracking="off")
    return train(f"tests.engine.late_recipes:{name}", Settings(epochs=2), options, output=output, on_event=on_event)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_fail_later_is_refused_at_once(alone, tmp_path, name):
    events: list[object] = []
    with pytest.raises(InputError) as caught:
        run(name, tmp_path, on_event=events.append)
    assert not any(isinstance(event, RunStarted) for event in events)
    message = caught.value.message
    assert all(words in message for words in REFUSED[name]), message
    assert re.search(r" must define |_recipes.py, line \d+", message), message


@pytest.mark.parametrize("name", SOUND)
def test_what_only_looks_like_it_is_trained(alone, tmp_path, name):
    assert len(run(name, tmp_path).epochs) == 2


def test_predictions_of_types_that_no_backend_adds_up_come_from_all_ranks(tmp_path):
    run("Predicting", tmp_path, nproc=2)
    predictions = np.load(tmp_path / "predictions.npy")
    assert (predictions.dtype, predictions.shape) == (np.int16, (12, 8))
    assert predictions.any(1).all()


@pytest.mark.slow
def test_a_network_that_model_has_compiled_is_trained_as_it_is(tmp_path):
    plain, compiled = (run(name, tmp_path / name, nproc=2).epochs[-1] for name in ("Normalised", "Compiled"))
    assert compiled.train == pytest.approx(plain.train, rel=1e-6)


def test_every_recipe_of_the_module_is_tested():
    kinds = [kind for kind in vars(late_recipes).values() if isinstance(kind, type) and issubclass(kind, Sound)]
    recipes = {kind.__name__ for kind in kinds if kind.__module__ == late_recipes.__name__}
    assert recipes <= {*REFUSED, *SOUND}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("clip_norm", -1, "at least 0, got -1"),
        ("clip_norm", float("nan"), "a number, got NaN"),
        ("ema_decay", 1.5, "at least 0 and below 1, got 1.5"),
        ("micro_batch", -2, "at least -1, got -2"),
        ("micro_batch", 2.5, "a whole number, got 2.5"),
        ("length_window", True, "a whole number, got true"),
        ("passes_per_epoch", 0, "at least 1, got 0"),
        ("passes_per_epoch", 1.5, "a whole number, got 1.5"),
        ("train_fraction", 2, "above 0 and at most 1, got 2"),
        ("has_validation", "yes", 'true or false, got "yes"'),
        ("percent", "accuracy", "a tuple of names, such as (\"accuracy\",), got 'accuracy'"),
    ],
)
def test_an_attribute_that_breaks_its_rule_is_refused(name, value, rule):
    recipe = Sound(Settings())
    setattr(recipe, name, value)
    with pytest.raises(InputError, match=re.escape(f"Sound.{name} must be {rule}")):
        check_attributes(recipe)


def test_attributes_may_be_numbers_of_numpy_and_get_their_own_type():
    recipe: Any = Sound(Settings())
    recipe.ema_decay, recipe.micro_batch, recipe.length_window = np.float64(0.9), np.int64(4), 2.0
    check_attributes(recipe)
    assert [type(value) for value in (recipe.ema_decay, recipe.micro_batch, recipe.length_window)] == [
        float,
        int,
        int,
    ]
