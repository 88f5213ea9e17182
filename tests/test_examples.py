"""Each example, as its user runs it, and on 1, 2 and 3 ranks, and killed in the middle."""

import ast
import functools
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from flyte_ddp.data import prepared
from flyte_ddp.data.datasets import prepare
from flyte_ddp.data.writer import write_prepared
from flyte_ddp.events import CheckpointWritten, Event, StepLogged
from flyte_ddp.launch.failures import RecoverableRankFailed
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {
    "autoencoder": "AutoencoderRecipe",
    "charlm": "CharLM",
    "contrastive": "Contrastive",
    "resnet": "ResNet",
    "segmentation": "Segmentation",
    "tabular": "Tabular",
}
# A few steps, the last one of another size
SMALL: Dict[str, Dict[str, Any]] = {
    "autoencoder": {"batch_size": 16},
    "charlm": {"characters": 12_000, "batch_size": 64, "width": 16, "layers": 1},
    "contrastive": {"batch_size": 400},
    # Adam's first steps are of one size, even where a gradient is nothing but rounding: hence small ones
    "resnet": {"batch_size": 20, "side": 32, "learning_rate": 1e-5},
    "segmentation": {"images": 120, "width": 4},
    "tabular": {"batch_size": 20},
}
# By the workflow: settings, and what the last epoch's measures have to be
ENOUGH: Dict[str, Tuple[Dict[str, Any], str]] = {
    "autoencoder": ({"epochs": 1}, "0 < loss < 0.08"),
    "charlm": (
        {"characters": 40_000, "batch_size": 16, "epochs": 3, "width": 16},
        "perplexity < 40 and accuracy > 0.1",
    ),
    "contrastive": ({"epochs": 3}, "retrieval > 0.15"),
    "resnet": ({"epochs": 3, "side": 32, "batch_size": 8, "learning_rate": 3e-4}, "accuracy > 0.8"),
    "segmentation": ({"images": 400, "batch_size": 16}, "iou > 0.5 and dice > iou"),
    "tabular": ({}, "0.4 < r2 < 0.6"),
}


def small(name):
    return {"epochs": 1, "log_interval": 1, "precision": "float32", **SMALL[name]}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder of a user's own with the examples in it, and images in folders."""
    place = tmp_path_factory.mktemp("user") / "examples"
    shutil.copytree(ROOT / "examples", place, ignore=shutil.ignore_patterns("__pycache__", ".venv"))
    digits = load_digits()
    for label in (0, 1):
        (place / "images" / str(label)).mkdir(parents=True)
        for number, image in enumerate(digits.images[digits.target == label][:50]):
            pixels = Image.fromarray((image * 15.9).astype(np.uint8)).resize((32, 32))
            pixels.save(place / "images" / str(label) / f"{number}.png")
    return place


@pytest.fixture(scope="module")
def data(project):
    """What a recipe is given, by its name."""
    folder = project / "prepared"
    images, labels = prepared.open_split(prepare("digits"), "train")
    write_prepared(folder, "small", list("0123456789"), images[:300], labels[:300], images[:50], labels[:50])
    return {"autoencoder": str(folder), "resnet": str(project / "images")}


@pytest.fixture(scope="module")
def trained(project, data, tmp_path_factory):
    """trained(name, nproc): the folder of an undisturbed training, and the loss of each step and of the test."""
    sys.path.insert(0, str(project))

    @functools.cache
    def run(name, nproc):
        place = tmp_path_factory.mktemp(name)
        events: List[Event] = []
        result = train_small(name, data, place, events.append, nproc, checkpoint_seconds=60)
        losses = [event.measures["loss"] for event in events if isinstance(event, StepLogged)]
        return place, [*losses, result.epochs[-1].test["loss"]]

    yield run
    sys.path.remove(str(project))


def train_small(name, data, output, on_event, nproc=2, checkpoint_seconds=0.0):
    settings = importlib.import_module(f"{name}.settings").Settings(**small(name))
    options = RunOptions(nproc=nproc, checkpoint_seconds=checkpoint_seconds, tracking="off", loader_workers=0)
    return train(f"{name}.recipe:{RECIPES[name]}", settings, options, data.get(name), output, on_event=on_event)


def weights(place):
    return torch.load(place / "model.pt", weights_only=True)


def test_an_example_is_short_and_its_settings_need_no_torch():
    assert {path.parent.name for path in ROOT.glob("examples/*/recipe.py")} == set(RECIPES)
    for name in RECIPES:
        folder = ROOT / "examples" / name
        lines = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
        assert lines["recipe.py"] <= 60
        assert lines["workflow.py"] <= 30
        assert lines["__init__.py"] == 0
        docstring = ast.get_docstring(ast.parse((folder / "workflow.py").read_text()))
        assert docstring is not None
        assert f"pyflyte run {name}/workflow.py {name}_wf" in docstring
        assert f"make example NAME={name}" in (ROOT / "examples" / "README.md").read_text()
        assert "torch" not in (folder / "settings.py").read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_the_workflow_of_an_example_trains(project, name):
    settings, enough = ENOUGH[name]
    command = ["pyflyte", "run", f"{name}/workflow.py", f"{name}_wf", "--settings", json.dumps(settings)]
    command += ["--folder", "images"] if name == "resnet" else []
    done = subprocess.run(
        command, cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"epoch_measures=(\[.*?])", done.stdout)
    epochs = ast.literal_eval(found)
    assert len(epochs) == settings.get("epochs", len(epochs))
    assert eval(enough, {}, epochs[-1]), epochs
    (report,) = re.findall(r"report=([^,]+),", done.stdout)
    assert ("image, " in Path(report).read_text()) == (name in ("autoencoder", "segmentation"))


@pytest.mark.parametrize("name", RECIPES)
def test_the_result_is_the_same_on_1_2_and_3_ranks(trained, name):
    place, losses = trained(name, 1)
    expected = weights(place)
    assert len(losses) > 3
    size = sum(value.double().square().sum() for value in expected.values()).sqrt()
    for nproc in (2, 3):
        place, found = trained(name, nproc)
        assert found == pytest.approx(losses, rel=1e-5)
        gaps = (weights(place)[key].double() - value.double() for key, value in expected.items())
        assert sum(gap.square().sum() for gap in gaps).sqrt() < 1e-4 * size


@pytest.mark.parametrize("name", RECIPES)
def test_killed_in_the_middle_the_same_call_ends_with_the_same_bits(trained, project, data, name, tmp_path):
    def kill_a_rank(event):
        if isinstance(event, CheckpointWritten):
            os.kill(max(child.pid or 0 for child in multiprocessing.active_children()), signal.SIGKILL)

    expected = weights(trained(name, 2)[0])
    if name in ("contrastive", "resnet", "segmentation"):
        with pytest.raises(RecoverableRankFailed, match="SIGKILL"):
            train_small(name, data, tmp_path, kill_a_rank)
    else:
        kill_all(project, name, data.get(name), tmp_path)
    assert (tmp_path / "checkpoint").exists()
    events: List[Event] = []
    train_small(name, data, tmp_path, events.append)
    assert min(event.step for event in events if isinstance(event, StepLogged)) > 1
    found = weights(tmp_path)
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def kill_all(project, name, data, output):
    """The same training in a process of its own, killed with its ranks after the first checkpoint."""
    program = f"""
import os, signal
from {name}.settings import Settings
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train

def kill(event):
    if type(event).__name__ == "CheckpointWritten":
        os.killpg(0, signal.SIGKILL)

if __name__ == "__main__":
    settings, options = Settings(**{small(name)!r}), RunOptions(nproc=2, checkpoint_seconds=0, tracking="off")
    train("{name}.recipe:{RECIPES[name]}", settings, options, {data!r}, {str(output)!r}, on_event=kill)
"""
    (project / "kill.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "kill.py"], cwd=project, env={**os.environ, "PYTHONPATH": f"{ROOT}:{project}"},
        start_new_session=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
