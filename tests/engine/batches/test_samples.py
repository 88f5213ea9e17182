"""Data that NumPy holds in ways that torch has not are trained on; samples that lack something are named."""

import re

import pytest

from flyte_ddp.errors import DataError, InputError
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine import sample_recipes
from tests.engine.probe_recipes import Settings, Sound

HELD = ["BytesSwapped", "Reversed", "OfEightyBits", "OfAField", "OnDisk", "OfSixteenBits", "Computed"]
ALIKE = ["LikeADict", "SamplesLikeDicts", "LikeADataset"]
NO_NUMBERS = {"TextOnDisk": "bytes64", "NamedArrays": "str192"}
OTHERWISE_HELD = {
    "Sparse": "data must be dense tensors, got a sparse_coo one: pad it, call to_dense()",
    "Nested": "data must be dense tensors, got a nested one: pad it",
    "ListedSamples": "as many in all tensors, got (8,), (), (8,), (), (8,), () and 18 more: stack them",
}


def run(name, output):
    options = RunOptions(loader_workers=0, tracking="off")
    return train(f"{sample_recipes.__name__}:{name}", Settings(epochs=2), options, output=output)


@pytest.mark.parametrize("name", HELD)
def test_arrays_of_any_numbers_are_trained_on(alone, tmp_path, name):
    assert len(run(name, tmp_path).epochs) == 2


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_like_a_dict_or_a_dataset_is_taken_as_one(alone, tmp_path, name):
    assert run(name, tmp_path / "alike").digest == run("Sound", tmp_path / "plain").digest


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_arrays_of_something_else_are_refused(alone, tmp_path, name):
    with pytest.raises(InputError, match=rf"{name}\.data .*line \d+.* must be numbers, got {NO_NUMBERS[name]}"):
        run(name, tmp_path)


@pytest.mark.parametrize("name", OTHERWISE_HELD)
def test_tensors_whose_first_dimension_is_not_the_samples_are_refused(alone, tmp_path, name):
    with pytest.raises(InputError, match=rf"{name}\.data .*{re.escape(OTHERWISE_HELD[name])}"):
        run(name, tmp_path)


def test_a_table_of_columns_is_refused(alone, tmp_path):
    with pytest.raises(InputError, match=r"ATable\.data .* must be tensors, arrays or a Dataset, got DataFrame"):
        run("ATable", tmp_path)


def test_a_dataset_with_strings_in_its_samples_is_refused(alone, tmp_path):
    with pytest.raises(
        DataError, match=r"NamedRows: samples must be numbers, got str in sample 0: leave it out, or encode"
    ):
        run("NamedSamples", tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LackingSamples", r"Lacking: samples must be numbers, got NoneType in sample 5: leave it out"),
        ("LackingLabels", r"LackingLabel: samples must be numbers, got NoneType in sample 5: leave it out"),
        (
            "LackingParts",
            r"samples must be built alike, got \('ndarray', 'ndarray'\) as sample \d and ndarray as sample 5",
        ),
    ],
)
def test_a_sample_that_lacks_something_is_named(alone, tmp_path, name, words):
    with pytest.raises(DataError, match=words):
        run(name, tmp_path)


def test_a_sample_that_cannot_be_read_says_why_in_its_first_line(alone, tmp_path):
    with pytest.raises(DataError, match=r"^a sample could not be read: FileNotFoundError: images/\d+.png\n"):
        run("MissingSamples", tmp_path)


def test_every_recipe_of_the_module_is_tested():
    kinds = [kind for kind in vars(sample_recipes).values() if isinstance(kind, type) and issubclass(kind, Sound)]
    recipes = {kind.__name__ for kind in kinds if kind.__module__ == sample_recipes.__name__}
    assert recipes - {*HELD, *ALIKE, *NO_NUMBERS, *OTHERWISE_HELD} == {
        "ATable", "NamedSamples", "MissingSamples", "LackingSamples", "LackingLabels", "LackingParts",
    }  # fmt: skip
