"""A network that is sharded within nodes, each of which has a copy, is trained as it is otherwise."""

import shutil

import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointRefused, RunStarted, StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import RankError
from flyte_ddp.manifest import read_manifest
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import Settings
from tests.engine.sharding.sharded_runs import HERE, assert_alike
from tests.engine.sharding.sharded_runs import run as train

SETTINGS = Settings(batch_size=32, epochs=2, log_interval=1)  # 10 steps
pytest.importorskip("torch.distributed.fsdp")


def run(folder, sharding, target="train_on_two_nodes", ranks=4):
    """Losses of each step, the result of rank 0, its weights, and where training started."""
    folder.mkdir(exist_ok=True)
    losses, started, refused = {}, [], []

    def listen(event):
        if isinstance(event, StepLogged):
            losses[event.epoch, event.step] = event.measures["loss"]
        started.extend([(event.first_epoch, event.first_step)] if isinstance(event, RunStarted) else [])
        refused.extend([event] if isinstance(event, CheckpointRefused) else [])

    options = RunOptions(sharding=sharding, loader_workers=0, checkpoint_seconds=1e9)
    job = job_in(folder, make_subject(find_code(f"{HERE}:Everything"), SETTINGS), options)
    where = f"tests.engine.sharding_targets:{target}"
    result, *_ = launcher.launch(where, World(ranks, ranks, "gloo", "cpu"), job, 120, listen)
    assert not refused
    return losses, result, torch.load(folder / "model.pt", weights_only=True), started[0]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hybrid"), "hybrid")


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The folder of a training that was killed after its first epoch."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(RankError, match="rank 3"):
        run(folder, "hybrid", "kill_on_two_nodes")
    manifest = read_manifest(folder / "checkpoint")
    assert manifest
    assert sorted(manifest["files"]) == ["0.safetensors", "1.safetensors"]
    return folder


@pytest.mark.slow
def test_killed_it_goes_on_with_the_same_bits(hybrid, cut, tmp_path):
    """The second node gets its rows from the first."""
    resumed = run(shutil.copytree(cut, tmp_path / "cut"), "hybrid")
    assert resumed[3] == (1, 0)
    assert len(hybrid[0]) == 10
    assert resumed[0] == {step: loss for step, loss in hybrid[0].items() if step > (1, 0)}
    assert all(torch.equal(resumed[2][name], value) for name, value in hybrid[2].items())


@pytest.mark.slow
def test_full_sharding_goes_on_from_it(hybrid, cut, tmp_path):
    """So its second epoch is as that of full sharding."""
    resumed = run(shutil.copytree(cut, tmp_path / "cut"), "full")
    assert resumed[3] == (1, 0)
    assert_alike(resumed, hybrid)


@pytest.mark.usefixtures("alone")
def test_on_one_node_it_is_full(tmp_path):
    full, hybrid = (train("Sharded", tmp_path / sharding, sharding)[2] for sharding in ("full", "hybrid"))
    assert all(torch.equal(hybrid[name], value) for name, value in full.items())


@pytest.mark.slow
def test_nodes_with_different_numbers_of_ranks_are_refused(tmp_path):
    with pytest.raises(InputError, match="as many ranks as the others to shard within nodes, got 1 on one and 2 on"):
        run(tmp_path, "hybrid", "train_on_uneven_nodes", ranks=3)
