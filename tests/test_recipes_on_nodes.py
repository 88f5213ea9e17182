"""A user's own recipe on two nodes."""

import os
import platform
import re
import shutil
from functools import partial

import pytest
import torch

from flyte_ddp.manifest import read_manifest
from flyte_ddp.settings import RunOptions
from scripts.dry_run import build_package
from tests import examples
from tests.commands import ROOT, same
from tests.nodes import lose_one, meeting, weights
from tests.pod import IMAGE, TWO_NODES, is_whole, literal

pytest.importorskip("flytekitplugins.kfpytorch", reason="needs flytekitplugins-kfpytorch")
pytestmark = pytest.mark.slow


@pytest.fixture
def charlm(tmp_path):
    """A function that makes a function that makes a node's pod of the example, from a copy of it."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "charlm", project / "charlm")

    def of_options(options):
        inputs = {"settings": literal(examples.small_settings("charlm")), "options": literal(options)}
        environment = {**TWO_NODES, "PYTHONPATH": str(ROOT)}
        built = build_package(IMAGE, environment=environment, package="charlm", folder=project)
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(project)])}
        task = built.tasks["charlm.multinode.train_charlm_multinode"]
        return partial(meeting(tmp_path), task=task, inputs=inputs, environment=path)

    return of_options


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
