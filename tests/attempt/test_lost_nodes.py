"""A sharded training on two nodes that loses one of them while it uploads a checkpoint."""

import shutil

import pytest
import torch

from benchmarks import lost_nodes
from flyte_ddp.settings import RunOptions
from tests.attempt.test_platform_training import Folders
from tests.attempt.test_rank_checkpoints import Rank  # noqa: F401  # skips where torch cannot shard
from tests.attempt.test_sharded_checkpoints import Sharded
from tests.commands import same
from tests.engine.probe_recipes import Settings

pytestmark = pytest.mark.slow


SETTINGS = Settings(**{**lost_nodes.SETTINGS, "epochs": 2})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a training by two ranks on one node."""
    options = RunOptions(nproc=2, sharding="full", tracking="off", loader_workers=0)
    model = Sharded(Folders(tmp_path_factory.mktemp("undisturbed"))).run(SETTINGS, options).model
    return torch.load(model, weights_only=True)


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """The root of a platform on which an attempt ended as it lost a node."""
    root = tmp_path_factory.mktemp("lost")
    assert 0 not in lost_nodes.attempt(root, 0, epochs=2, victim=1, operation=40)
    return root


def test_a_training_that_loses_a_node_while_it_uploads_ends_with_the_same_bits(lost, tmp_path, undisturbed):
    assert lost_nodes.check_whole(lost, 0)
    shutil.copytree(lost / "0", tmp_path / "0")
    assert lost_nodes.attempt(tmp_path, 1, epochs=2) == [0, 0]
    assert "resuming from the checkpoint" in lost_nodes.logged(tmp_path, 1)
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), undisturbed)


def test_one_node_goes_on_from_the_files_of_two(lost, tmp_path, undisturbed):
    for sharding in ("full", "off"):
        shutil.copytree(lost / "0", tmp_path / sharding / "0")
        options = RunOptions(nproc=2, sharding=sharding, tracking="off", loader_workers=0)
        model = Sharded(Folders(tmp_path / sharding, attempt=1)).run(SETTINGS, options).model
        found = torch.load(model, weights_only=True)
        assert "resuming from the checkpoint" in (tmp_path / sharding / "1" / "logs" / "console.log").read_text()
        assert sharding == "off" or same(found, undisturbed)
        assert all(torch.allclose(found[name], value, rtol=1e-3, atol=1e-4) for name, value in undisturbed.items())
