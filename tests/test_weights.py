"""Files of weights: what is in them besides, and what keeps them from being those of a network."""

import json
import math
import re
import tracemalloc
from dataclasses import replace
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flyte_ddp.errors import InputError
from flyte_ddp.model_files.model_metadata import ModelMetadata, add_metadata, read_metadata
from flyte_ddp.model_files.weights import load_weights, read_weights
from flyte_ddp.recipe import Recipe
from flyte_ddp.recipes.models import OURS, load_model

KNOWN = ModelMetadata(
    recipe="a:Recipe",
    settings_class="a:Settings",
    settings={"epochs": 1},
    data={"name": "digits", "digest": ""},
    facts={"classes": ["été", "hiver"]},
    headline="accuracy",
    measures={"accuracy": 0.9},
    training={"world_size": 2},
    versions={"torch": "2.15"},
)
OWN = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).state_dict()


@pytest.mark.parametrize("memory_map", [False, True])
def test_metadata_in_a_file_leave_its_weights_as_they_are(tmp_path, memory_map):
    path = tmp_path / "model.pt"
    torch.save(OWN, path)
    assert read_metadata(path) is None
    add_metadata(path, KNOWN)
    assert read_metadata(path) == KNOWN
    found = torch.load(path, weights_only=True, mmap=memory_map)
    assert all(torch.equal(found[name], value) for name, value in OWN.items())


def test_measures_that_are_not_finite_are_in_strict_json(tmp_path):
    """For other programs, of which some refuse a NaN; it goes into model.json of an export, too."""
    path = tmp_path / "model.pt"
    torch.save(OWN, path)
    known = replace(KNOWN, measures={"accuracy": 0.9, "recall": math.nan}, facts={"weight": np.float64("inf")})
    add_metadata(path, known)

    def refuse(name):
        raise AssertionError(name)

    assert json.loads(known.as_json(), parse_constant=refuse)["measures"] == {"accuracy": 0.9, "recall": None}
    found = read_metadata(path)
    assert found
    assert found.measures == pytest.approx(known.measures, nan_ok=True)
    assert found.digest == known.digest


def test_metadata_of_a_damaged_file_are_none(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(OWN, path)
    add_metadata(path, KNOWN)
    content = path.read_bytes()
    for damaged in (content[:-100], content.replace(b"a:Recipe", b"b:Recipe")):
        path.write_bytes(damaged)
        assert read_metadata(path) is None
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", content)]  # of the archive's directory
    for offset, value in ((8, b"\1"), (10, b"\x63"), (10, b"\x08"), (42, b"\xff\xff\xff\x7f")):  # encrypted, packed, …
        at = entries[-1] + offset
        path.write_bytes(content[:at] + value + content[at + len(value) :])
        assert read_metadata(path) is None


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, json.dumps({**vars(KNOWN), "recipe": 5}), json.dumps({**vars(KNOWN), "facts": []}), "0" * 2**21],
)
def test_metadata_that_are_not_ours_are_none(tmp_path, text):
    path = tmp_path / "model.pt"
    with ZipFile(path, "w", ZIP_STORED) as archive:
        archive.writestr("archive/flyte_ddp.json", text)
    assert read_metadata(path) is None


def test_packed_metadata_are_not_unpacked(tmp_path):
    path = tmp_path / "model.pt"
    padded = {**vars(KNOWN), "facts": {"zeros": "0" * 10**8}}
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("archive/flyte_ddp.json", json.dumps(padded))
    del padded
    tracemalloc.start()
    assert read_metadata(path) is None
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {**OWN, "1.bias": torch.zeros(5)},
            "must fit the network, got {path} with wrong shapes 1.bias (5,) instead of (2,): use",
        ),
        ({"1.bias": OWN["1.bias"]}, "{path} with missing keys 0.bias, 0.weight, 1.weight: use"),
        (
            {f"more{number}": torch.zeros(1) for number in range(9)} | OWN,
            "{path} with unexpected keys more0, more1, more2, more3, more4, more5 and 3 more: use",
        ),
        ([1, 2], "must be a state_dict of tensors, but {path} holds something else (list): use"),
        ({"epoch": 3}, "{path} holds something else (dict): use"),
        (nn.Linear(2, 2), "{path} cannot be read safely (UnpicklingError): use"),
        (b"", "{path} cannot be read safely (EOFError): use"),
        (b"no weights", "{path} cannot be read safely (UnpicklingError): use"),
        (b'\x40\0\0\0\0\0\0\0{"0.bias": {', "{path} cannot be read safely (SafetensorError): use"),
        (None, "{path} cannot be read safely (No such file or directory): use"),
    ],
)
def test_a_file_that_is_not_of_the_network_is_one_error_that_names_it(tmp_path, content, words):
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(InputError) as refused:
        load_weights(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), path)
    said = str(refused.value)
    assert "\n" not in said
    assert said.startswith("model_state must ")
    assert words.format(path=path) in said


def test_a_file_that_is_cut_short_is_said_to_be(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(OWN, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        InputError, match=f"^model_state must be a whole file, but {path} is damaged, or cut short: copy"
    ):
        read_weights(path, remedy="set other options")


def test_a_file_is_known_by_its_content(tmp_path):
    path = tmp_path / "model.pt"
    save_file(OWN, path)
    network = load_weights(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), path)
    assert torch.equal(network.state_dict()["1.weight"], OWN["1.weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"recipe": "nowhere.model:Recipe"},
            r"the recipe, nowhere.model:Recipe, cannot be imported \(Module.*",
        ),
        (
            {"recipe": "torch.nn:Nothing"},
            r"the recipe, torch.nn:Nothing, cannot be imported \(Attr.*Nothing.*",
        ),
        ({"recipe": "no name"}, r"the recipe, no name, cannot be imported \(ValueError: .*"),
        ({"recipe": "torch.nn:Linear"}, "the recipe must be derived from Recipe, got torch.nn:Linear"),
        (
            {"settings_class": "nowhere:Own"},
            "the class of the settings, nowhere:Own, cannot .*put that folder on PY",
        ),
        (
            {"settings": {"gone": 1}},
            'is of other settings than .* now, load it with that code: Settings has no field "gone"',
        ),
        ({"settings_class": "torch.nn:Linear"}, "the class of the settings must be derived from Settings, got"),
    ],
)
def test_a_class_that_metadata_name_in_vain_is_said_with_the_file_and_the_remedy(tmp_path, change, words):
    path = tmp_path / "model.pt"
    torch.save(OWN, path)
    known = {"recipe": "tests.engine.probe_recipes:Sound", "settings_class": "tests.engine.probe_recipes:Settings"}
    add_metadata(path, replace(KNOWN, **{**known, **change}))
    with pytest.raises(InputError, match=f"^{path}:? {words}"):
        load_model(path)


@pytest.mark.parametrize("load", [load_model, Recipe.load_model])
def test_a_plain_state_dict_and_a_damaged_file_are_told_apart(tmp_path, load):
    torch.save(OWN, tmp_path / "model.pt")
    save_file(OWN, tmp_path / "model.safetensors")
    for name, read in (("pt", "torch.load(path, weights_only=True)"), ("safetensors", "safetensors.torch.load_file(")):
        words = f"load a network of your own by model.load_state_dict({read}"
        with pytest.raises(InputError, match=re.escape(words)):
            load(tmp_path / f"model.{name}")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cut.pt.* damaged.*: copy it again"):
        load(tmp_path / "cut.pt")


@pytest.mark.parametrize("load", [load_model, Recipe.load_model])
def test_a_place_without_a_file_is_not_taken_for_one_without_metadata(tmp_path, load):
    for place in (tmp_path, tmp_path / "nowhere.pt"):
        with pytest.raises(InputError, match=rf"^model_state must be a file, and {place} is none: give the one of a"):
            load(place)


def test_a_network_that_is_not_built_in_is_refused_with_the_names_of_those_that_are(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(OWN, path)
    with pytest.raises(
        InputError, match=r"^the network must be one of mnist_cnn, .*, airbench94, got 'resnet50': corr"
    ):
        load_model(path, name="resnet50")
    add_metadata(path, replace(KNOWN, recipe=OURS, facts={"network": "newer_cnn"}))
    with pytest.raises(InputError, match=rf"got 'newer_cnn': correct name, or load {path} with the version that wrote"):
        load_model(path)
