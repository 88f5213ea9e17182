"""A user's own recipe on a cluster: what is registered, and the command that its pod runs."""

import functools
import os
import shutil
from pathlib import Path

import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.settings import RunOptions
from scripts.dry_run import build_package
from tests import examples
from tests.commands import ROOT, same
from tests.pod import IMAGE, Pod, literal

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the examples, as a user's repository that can be imported from."""
    place = tmp_path / "project"
    shutil.copytree(ROOT / "examples", place, ignore=shutil.ignore_patterns("__pycache__", ".venv"))
    monkeypatch.syspath_prepend(str(place))
    return place


@functools.cache
def as_it_is():
    """The task of the example."""
    return registered(examples.project())


def registered(place: Path):
    environment = {"DDP_PROFILE": "sandbox", "PYTHONPATH": str(ROOT)}
    return build_package(IMAGE, environment=environment, package="charlm", folder=place).tasks[
        "charlm.workflow.train_charlm"
    ]


def test_a_pod_trains_a_recipe_as_a_plain_call_does(tmp_path):
    place = examples.project()
    inputs = {"settings": literal(examples.small_settings("charlm")), "options": literal(RunOptions())}
    path = os.pathsep.join([str(ROOT), str(place)])
    outputs = Pod(as_it_is(), inputs, tmp_path / "pod", {"PYTHONPATH": path}).run()
    theirs = torch.load(outputs["model_state"].scalar.blob.uri, weights_only=True)
    assert same(theirs, examples.trained("charlm", 2).weights)


def test_the_cache_follows_the_recipes_code_and_not_its_comments(project):
    file = project / "charlm" / "recipe.py"
    first, version = as_it_is().metadata.discovery_version, find_code("charlm.recipe:CharLM").version
    file.write_text(f"# a remark\n{file.read_text()}")
    (project / "tabular" / "recipe.py").write_text("no longer Python")  # another project's
    assert find_code("charlm.recipe:CharLM").version == version
    file.write_text(file.read_text().replace("norm_first=True", "norm_first=False"))
    assert find_code("charlm.recipe:CharLM").version != version
    assert registered(project).metadata.discovery_version != first
