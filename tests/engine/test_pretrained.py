"""A training that starts from a folder of weights, which has to be whole, and which its model() has to load."""

import importlib
import json
import shutil
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from flyte_ddp.errors import InputError
from flyte_ddp.events import RunStarted
from flyte_ddp.launch.failures import RankError
from flyte_ddp.model_files.pretrained import check_pretrained
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import Settings
from tests.engine.test_frozen_base import run, weights

INDEX = "model.safetensors.index.json"


@pytest.fixture
def recipes() -> Any:
    """Their module. It imports transformers and peft, which takes 1.4 s: not in each process that collects tests."""
    return importlib.import_module("tests.engine.pretrained_recipes")


@pytest.fixture
def folder(tmp_path):
    """Two files of weights, their index, and a configuration."""
    place = tmp_path / "pretrained"
    place.mkdir()
    (place / "config.json").write_text("{}")
    save_file({"first": torch.ones(3), "nothing": torch.ones(0)}, place / "a.safetensors", metadata={"format": "pt"})
    save_file({"last": torch.ones(2, 2)}, place / "b.safetensors")
    names = {"first": "a.safetensors", "nothing": "a.safetensors", "last": "b.safetensors"}
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    check_pretrained(place)
    return place


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda folder: cut(folder / "b.safetensors"),
            "whole files, but .*b.safetensors was cut off or damaged: write",
        ),
        (lambda folder: (folder / "b.safetensors").write_bytes(b"\x09"), "b.safetensors was cut off or damaged"),
        (lambda folder: (folder / "b.safetensors").write_bytes(b"\xff" * 99), "b.safetensors was cut off or damaged"),
        (
            lambda folder: (folder / "b.safetensors").write_bytes(
                (32).to_bytes(8, "little") + b'{"x":{"data_offsets":[0,1e400]}}'
            ),
            "b.safetensors was cut off or damaged",
        ),
        (
            lambda folder: (folder / "b.safetensors").write_bytes(b"version https://git-lfs"),
            "b.safetensors was cut off",
        ),
        (
            lambda folder: (folder / "b.safetensors").unlink(),
            r"all weights of model.*index.json, but .* lacks last in b",
        ),
        (lambda folder: shutil.copy(folder / "a.safetensors", folder / "b.safetensors"), "lacks last in b.safetensors"),
        (lambda folder: cut(folder / INDEX), "index.json was cut off or damaged"),
        (lambda folder: (folder / INDEX).write_text("{}"), "index.json was cut off or damaged"),
        (
            lambda folder: (folder / INDEX).write_text('{"weight_map": {"first": ["a.safetensors"]}}'),
            "index.json was cut off or damaged",
        ),
        (
            lambda folder: (folder / "a.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
            "lacks first in a.safetensors",
        ),
        (
            lambda folder: shutil.copy(folder / "a.safetensors", folder / "model-00001-of-00002.safetensors"),
            "must have the index of its files, but .* has none for model-00001-of-00002.safetensors: write it anew",
        ),
        (lambda folder: cut(folder / "config.json"), "config.json was cut off or damaged"),
        (
            lambda folder: (folder / "config.json").unlink(),
            "must have a config.json or adapter_config.json, but .* has none",
        ),
        (
            lambda folder: [file.unlink() for file in folder.glob("*.safetensors*")],
            r"weights as .safetensors, but .* none",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(folder, damage, words):
    damage(folder)
    with pytest.raises(InputError, match=words):
        check_pretrained(folder)


@pytest.mark.usefixtures("alone")
def test_a_training_starts_from_a_folder_which_belongs_to_its_identity(tmp_path, recipes):
    first, other = tmp_path / "first", tmp_path / "other"
    recipes.save_encoder(first)
    recipes.save_encoder(other, seed=1)
    assert len(list(first.glob("*.safetensors"))) > 1
    result, events = run(recipes.Tuned, tmp_path, init=first)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.remarks == ["Starts from the folder first"]
    assert isinstance(tqdm.get_lock(), type(threading.RLock())), "or each rank would leave a semaphore behind"
    loaded = recipes.Tuned.load_model(result.model_path, init_path=first)
    assert loaded.state_dict().keys() == weights(result.model_path).keys()
    with pytest.raises(InputError, match=r"Tuned starts from given weights: give the folder that has them as init"):
        recipes.Tuned.load_model(result.model_path)
    with pytest.raises(InputError, match=r"Tuned starts from given weights"):
        run(recipes.Tuned, tmp_path / "none")
    shutil.copy(tmp_path / "final-checkpoint", tmp_path / "checkpoint")
    with pytest.raises(InputError, match="the checkpoint there belongs to another training: its init was"):
        run(recipes.Tuned, tmp_path, init=other)


@pytest.mark.usefixtures("alone")
def test_adapters_of_a_folders_weights_are_loaded_with_the_same_folder_alone(tmp_path, recipes):
    first, other = tmp_path / "first", tmp_path / "other"
    recipes.save_encoder(first, dtype=torch.bfloat16)
    recipes.save_encoder(other, seed=1, dtype=torch.bfloat16)
    result, _ = run(recipes.Adapted, tmp_path, init=first)
    assert {"lora" in name for name in weights(result.model_path)} == {True}
    loaded = recipes.Adapted.load_model(result.model_path, init_path=first)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32, torch.bfloat16}
    with pytest.raises(
        InputError, match=r"model_state leaves out .* give the settings, data and init of that training"
    ):
        recipes.Adapted.load_model(result.model_path, init_path=other)
    with pytest.raises(InputError, match=r"Untyped\.model .* is bfloat16, but what is trained must be float32"):
        run(recipes.Untyped, tmp_path / "untyped", init=first)


@pytest.mark.usefixtures("alone")
def test_a_folder_that_model_leaves_aside_is_refused(tmp_path, recipes):
    recipes.save_encoder(tmp_path / "first")
    with pytest.raises(InputError, match=r"Anew\.model .* must load init, which is the folder .*/first: for example"):
        run(recipes.Anew, tmp_path, init=tmp_path / "first")
    with pytest.raises(InputError, match=r"init_leave_out must be empty, because model\(\) itself loads the folder"):
        run(recipes.Tuned, tmp_path, init=tmp_path / "first", init_leave_out="classifier")


def test_a_rank_asks_no_hub(tmp_path, recipes):
    with pytest.raises(RankError, match=r"OSError: .* couldn't find them in the cached files"):
        train(recipes.FromTheHub, Settings(), RunOptions(nproc=1), output=tmp_path)
