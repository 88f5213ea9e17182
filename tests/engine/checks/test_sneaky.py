"""What a few samples at the start of the data, or training mode alone, would not show is refused too."""

import re
from pathlib import Path

import pytest
import torch
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode

from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.engine.checks.trials import Trials
from flyte_ddp.errors import InputError
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine import sneaky_recipes
from tests.engine.probe_recipes import Settings, Sound

FILE = str(Path(sneaky_recipes.__file__))
REFUSED = {
    "ScaledRate": ["ScaledRate.optimizer", "depends on the rank or the number of ranks", "batch_size"],
    "ScaledSchedule": ["ScaledSchedule.lr_lambda", "depends on the rank or the number of ranks"],
    "RankInMeasure": ["RankInMeasure.measure", "'loss' (", "depends on the rank or the number of ranks"],
    "VariableInAugment": ["VariableInAugment.augment", "depends on the rank or the number of ranks"],
    "ClampedByHook": ["the gradient of 0.weight is not the sum of its samples'", "clip_norm"],
    "ClampedAfterwards": ["the gradient of 0.weight is not the sum of its samples'"],
    "NormalisedBackward": ["the gradient of 0.weight is not the sum of its samples'", "backward()"],
    "ScaledTable": ["ScaledTable.forward", "changes weight of Embedding by the samples of its rank", "max_norm"],
    "MeanOfMany": ["MeanOfMany.forward", "depends on the others of its batch"],
    "SortedByClass": ["SortedByClass.forward", "depends on the others of its batch"],
    "TokenMean": ["TokenMean.measure", "'loss' (", "depends on the others of its batch"],
    "CentredInEvaluation": ["CentredInEvaluation.forward", "depends on the others of its batch"],
    "CentredPredictions": ["CentredPredictions.predictions", "depends on the others of its batch"],
    "NoisyTestSplit": ["NoisyTestSplit.data", 'split "test"', "FreshGenerator gives another sample each time"],
    "MixedByReader": ["MixedByReader.data", "depends on the others of its batch", "its Dataset"],
}


def run(name, output, nproc=0):
    options = RunOptions(nproc=nproc, loader_workers=0, tracking="off")
    return train(f"tests.engine.sneaky_recipes:{name}", Settings(), options, output=output)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_depend_on_the_number_of_ranks_is_refused(alone, tmp_path, name):
    with pytest.raises(InputError) as caught:
        run(name, tmp_path)
    message = caught.value.message
    assert all(words in message for words in REFUSED[name]), message
    assert re.search(rf"{re.escape(FILE)}, line \d+|tests/engine/probe_recipes.py", message), message


def test_ranks_that_measure_something_else_for_the_same_samples_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"ProcessInMeasure.measure .* each rank measures something else"):
        run("ProcessInMeasure", tmp_path, nproc=2)


def test_every_recipe_of_the_module_is_tested():
    kinds = [kind for kind in vars(sneaky_recipes).values() if isinstance(kind, type) and issubclass(kind, Sound)]
    recipes = {kind.__name__ for kind in kinds if kind.__module__ == sneaky_recipes.__name__}
    assert recipes - {*REFUSED} == {
        "ProcessInMeasure", "Padded", "PaddedDropout", "Drawing", "RareDropPath", "RareDropout", "MaskedAttention"
    }  # fmt: skip


def agrees(name, size):
    """Whether a batch and its parts, each read by itself, have the same losses."""
    recipe = getattr(sneaky_recipes, name)(Settings())
    data = recipe.data("train")
    split = Resident(data, recipe.device) if isinstance(data, torch.Tensor) else Streamed(data, recipe.device)
    trials = Trials(recipe, recipe.model(), GlobalBatchMode(recipe.share), split, size)
    whole, *parts = [trials(*part).pairs["loss"][0] for part in ((0, size), *trials.parts)]
    return torch.allclose(whole, torch.cat(parts), rtol=1e-3, atol=1e-5)


def test_rows_that_are_padded_to_the_longest_that_a_rank_has_pass(alone, tmp_path):
    assert not any("the number of ranks" in warning for warning in run("Padded", tmp_path).warnings)


def test_padded_rows_are_refused_unless_the_numbers_drawn_for_them_are_the_same(alone, tmp_path):
    if not agrees("PaddedDropout", 8):
        with pytest.raises(InputError, match=r"PaddedDropout.measure .* depends on the others of its batch"):
            run("PaddedDropout", tmp_path)


@pytest.mark.parametrize("name", ["RareDropPath", "RareDropout"])
def test_a_network_that_rarely_draws_is_refused_unless_it_draws_the_same(alone, tmp_path, name):
    if not agrees(name, 12 * 40):
        with pytest.raises(InputError, match="draws random numbers of its own"):
            run(name, tmp_path)


def test_attention_with_a_mask_but_without_dropout_passes(alone, tmp_path):
    run("MaskedAttention", tmp_path)
