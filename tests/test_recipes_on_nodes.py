"""Users' own trainings on two nodes."""

import os
import platform
import re
import shutil
from functools import partial
from importlib import import_module

import pytest
import torch

from flyte_ddp.lightning.settings import LightningOptions
from flyte_ddp.manifest import read_manifest
from flyte_ddp.settings import RunOptions
from scripts.dry_run import build_package
from tests import examples
from tests.commands import ROOT, same
from tests.lightning.project import train as train_lightning
from tests.lightning.project import write_project
from tests.nodes import lose_one, meeting, weights
from tests.pod import IMAGE, TWO_NODES, is_whole, literal, run_together

pytest.importorskip("flytekitplugins.kfpytorch", reason="needs flytekitplugins-kfpytorch")
pytestmark = pytest.mark.slow

UNDER_LIGHTNING = """
from flytekit import task

from flyte_ddp import LightningOptions, LightningTraining, RecipeOutputs
from flyte_ddp.flyte1.multinode import multinode
from numerals.settings import Settings

training = LightningTraining("numerals.model:LitNumerals", data="numerals.model:Numerals")


@task(**multinode(training.arguments()))
def train_on_nodes(settings: Settings, options: LightningOptions) -> RecipeOutputs:
    return training.run_as_rank(settings, options)
"""


@pytest.fixture
def pods_of(tmp_path):
    """A function that makes a function that makes a node's pod of a task of the project in this test's folder."""

    def of_task(task, settings, options):
        project, inputs = tmp_path / "project", {"settings": literal(settings), "options": literal(options)}
        package, environment = task.partition(".")[0], {**TWO_NODES, "PYTHONPATH": str(ROOT)}
        built = build_package(IMAGE, environment=environment, package=package, folder=project)
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(project)])}
        return partial(meeting(tmp_path), task=built.tasks[task], inputs=inputs, environment=path)

    return of_task


@pytest.fixture
def charlm(pods_of, tmp_path):
    """A function that makes a function that makes a node's pod of the example."""
    shutil.copytree(ROOT / "examples" / "charlm", tmp_path / "project" / "charlm")
    return partial(pods_of, "charlm.multinode.train_charlm_multinode", examples.small_settings("charlm"))


def on_both(make):
    return weights(run_together(*(make(name) for name in ("first", "second"))))


def test_a_users_sharded_recipe_that_loses_a_node_goes_on_from_the_files_of_both_as_in_a_plain_call(charlm, tmp_path):
    """Where a lost pod is started again, the other, whose rank fails with it, waits for it. Flyte's PyTorchJob does not
    start it again: there the next attempt resumes."""
    make, stored = charlm(RunOptions(sharding="full", checkpoint_seconds=0)), tmp_path / "stored"
    files = []

    def has_files_of_both():
        if is_whole(stored / "checkpoint"):
            files.append(len((read_manifest(stored / "checkpoint") or {}).get("files", ())))
        return bool(files)

    first, lost, done = lose_one(make, stored, has_files_of_both)
    assert files[0] == 2
    (rank,) = {*re.findall(r"\[rank (\d)\] Logs: ", lost.log)}
    (survivor,) = {"0", "1"} - {rank}
    assert f"rank {rank} on {platform.node()} does not answer" in (first.logs / f"rank-{survivor}.log").read_text()
    plain = examples.train_small("charlm", tmp_path / "plain", lambda event: None, sharding="full")
    assert same(weights(done.outputs()), torch.load(plain.model_path, weights_only=True))


def test_a_lightningmodule_as_on_one(pods_of, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    write_project(tmp_path / "project")
    (tmp_path / "project" / "numerals" / "nodes.py").write_text(UNDER_LIGHTNING)
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    settings = import_module("numerals.settings").Settings(epochs=2)
    found = on_both(pods_of("numerals.nodes.train_on_nodes", settings, LightningOptions()))
    assert same(found, train_lightning(tmp_path / "one", settings).weights)
