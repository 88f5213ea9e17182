"""What ranks write of a sharded checkpoint is whole or absent."""

import json
import math
import resource
import shutil
import tempfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.checkpoints import resume
from flyte_ddp.engine.checkpoints.checkpoint import FORMAT, read_checkpoint
from flyte_ddp.engine.checkpoints.resume import fetch_shards
from flyte_ddp.engine.checkpoints.shard_writer import ShardWriter, SharedFolder
from flyte_ddp.engine.checkpoints.sharded_checkpoint import describe_state, find_problem, rebuild_state
from flyte_ddp.engine.checkpoints.writer import CheckpointWriter, begin_file
from flyte_ddp.engine.job import make_job, make_subject
from flyte_ddp.engine.sharding.sharded_state import Layout, Shard
from flyte_ddp.errors import RecoverableError
from flyte_ddp.events import CheckpointFailed, Event
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.manifest import read_manifest, shards_beside
from flyte_ddp.recipe import CPU
from flyte_ddp.settings import TrainingSettings

ROOT = Path(__file__).parents[3]
ALONE = Environment(World(1, 1, "gloo", "cpu"), 0, 0, "", 1)


@pytest.fixture
def rank(tmp_path):
    """The only rank's writer."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield ShardWriter(SharedFolder(tmp_path / "checkpoint", ALONE), ALONE)
    distributed.destroy_process_group()


def make_content(step, *rows):
    """A checkpoint's content, with these tensors sharded over one rank."""
    shards = {str(number): Shard(tensor, tensor.shape) for number, tensor in enumerate(rows)}
    return {"format": FORMAT, "identity": {}, "state": {"progress": {"epoch": 0, "step": step}, "shards": shards}}


def test_a_state_comes_back_from_json_as_it_was():
    shard, tensor = Shard(torch.ones(1, 2), torch.Size((3, 2))), torch.zeros(2)
    state = {
        "tied": shard, "too": shard, "groups": [{"betas": (0.9, math.inf), "params": [0, 1], "none": None}],
        "state": {0: {"step": tensor}, 1: {}}, "order": OrderedDict(b=1, a=np.float32(0.1)),
    }  # fmt: skip
    description, tensors = describe_state(state)
    again = rebuild_state(json.loads(json.dumps(description)), tensors)
    assert again == {**state, "order": OrderedDict(b=1, a=float(np.float32(0.1)))}
    assert type(again["order"]["a"]) is float
    assert again["tied"] is again["too"] is shard
    assert len(tensors) == 2


@pytest.mark.parametrize("value", [torch.float32, {(1, 2): 3}, b"bytes", {1, 2}])
def test_what_json_does_not_have_is_refused(value):
    with pytest.raises(TypeError):
        rebuild_state(*describe_state([value]))


def test_tensors_of_a_gpu_may_change_once_they_are_copied(rank, tmp_path):
    rows = torch.ones(2, 3)
    rest = rank.begin(make_content(1, rows), torch.device("cuda"))
    rows.zero_()
    rest()
    assert torch.equal(read_checkpoint(tmp_path / "checkpoint", {})["state"]["shards"]["0"].read(), torch.ones(2, 3))


def test_tensors_may_change_once_they_are_copied_and_take_no_memory_meanwhile(rank, tmp_path):
    rows = [torch.full((2**11, 2**10), float(value)) for value in range(24)]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    (taken,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (int(taken) * 1024 + 3 * rows[0].nbytes, before[1]))
        rest = rank.begin(make_content(1, *rows), CPU)
        for tensor in rows:
            tensor.fill_(-1)
        rest()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    content = read_checkpoint(tmp_path / "checkpoint", {})
    assert not any(find_problem(*shard) for shard in content["shards"].items())
    for number, stored in content["state"]["shards"].items():
        assert bool((stored.read() == int(number)).all())
        assert torch.equal(stored[5:7][1:].read(), torch.full((1, 2**10), float(number)))


@pytest.mark.parametrize("step", [2, 1])
def test_one_that_cannot_be_written_leaves_the_one_before_and_nothing_else(rank, tmp_path, step):
    rank.begin(make_content(1, torch.ones(2, 2)), CPU)()
    path, before = tmp_path / "checkpoint", resource.getrlimit(resource.RLIMIT_FSIZE)
    (folder,) = shards_beside(path).iterdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(OSError, match=r"rank 0: .*File too large"):
            rank.begin(make_content(step, torch.ones(2**10, 2**10)), CPU)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_checkpoint(path, {})["state"]["progress"]["step"] == 1
    assert [*shards_beside(path).iterdir()] == [folder]
    rank.begin(make_content(3, torch.ones(2, 2)), CPU)()
    assert read_checkpoint(path, {})["state"]["progress"]["step"] == 3
    assert folder not in shards_beside(path).iterdir()
    begin_file(path, {}, make_content(4), CPU)()
    assert read_checkpoint(path, {})["state"]["progress"]["step"] == 4
    assert not shards_beside(path).exists()


def test_a_folder_that_cannot_be_listed_fails_where_all_ranks_learn_of_it(rank, tmp_path):
    rank.begin(make_content(1, torch.ones(2, 2)), CPU)()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))  # nothing more can be opened
    try:
        rest = rank.begin(make_content(2, torch.ones(2, 2)), CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with pytest.raises(OSError, match=r"rank 0: .*Too many open files"):
        rest()
    rank.begin(make_content(3, torch.ones(2, 2)), CPU)()
    path = tmp_path / "checkpoint"
    assert read_checkpoint(path, {})["state"]["progress"]["step"] == 3
    assert len([*shards_beside(path).iterdir()]) == 1


class Copies:
    """A storage whose URLs are files of this machine."""

    def get(self, url, file):
        shutil.copy(url, file)


@pytest.fixture
def stored(rank, tmp_path):
    """The manifest of a checkpoint in a storage, and a layout."""
    rank.begin(make_content(1, torch.ones(2, 2)), CPU)()
    path = tmp_path / "checkpoint"
    manifest = read_manifest(path) or {}
    manifest["url"] = str(shards_beside(path) / manifest["folder"])
    network = nn.Linear(1, 1)
    return manifest, Layout(network, torch.optim.SGD(network.parameters()))


def test_what_one_job_of_a_host_has_fetched_is_not_anothers(stored):
    manifest, layout = stored
    storage: Any = Copies()
    with fetch_shards(manifest, layout, storage, ALONE) as one:
        with fetch_shards(manifest, layout, storage, ALONE) as other:
            (file,) = other["shards"]
            file.write_bytes(b"damaged")
        assert torch.equal(one["state"]["shards"]["0"].read(), torch.ones(2, 2))
    assert not any(file.parent.exists() for file in (*one["shards"], *other["shards"]))


@pytest.mark.parametrize(
    ("error", "words"),
    [(RecoverableError("the storage is unreachable"), "unreachable"), (OSError(28, "No space left"), "No space left")],
)
def test_a_download_that_fails_leaves_no_folder_and_is_told_to_the_others(stored, tmp_path, monkeypatch, error, words):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    manifest, layout = stored
    told = []

    def refuse(*_):
        raise error

    def exchange(problem):
        told.append(problem)
        return [problem]

    monkeypatch.setattr(resume, "gather_values", exchange)
    storage: Any = SimpleNamespace(get=refuse)
    with pytest.raises(RecoverableError, match=words) as raised, fetch_shards(manifest, layout, storage, ALONE):
        pass
    assert told == [raised.value]
    assert [*(tmp_path / "temporary").iterdir()] == []


def test_a_download_that_fails_on_another_rank_is_raised_here_too(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    manifest, layout = stored
    monkeypatch.setattr(resume, "gather_values", lambda problem: [problem, RecoverableError("unreachable")])
    storage: Any = Copies()
    with pytest.raises(RecoverableError, match="unreachable"), fetch_shards(manifest, layout, storage, ALONE):
        pass
    assert [*(tmp_path / "temporary").iterdir()] == []


def test_a_rank_that_fails_in_whatever_way_tells_the_others_and_training(rank, tmp_path):
    class Breaking:
        """A storage with an error of its own."""

        def keep(self, file):
            raise LookupError("no such bucket")

        def __getattr__(self, name):
            return getattr(SharedFolder(tmp_path / "checkpoint", ALONE), name)

    breaking: Any = Breaking()
    writer, events = ShardWriter(breaking, ALONE), list[Event]()
    state: Any = SimpleNamespace(state_dict=dict, device=CPU, progress=SimpleNamespace(epoch=1, step=2))
    with pytest.raises(OSError, match="rank 0: LookupError: no such bucket"):
        writer.begin(make_content(1, torch.ones(2, 2)), CPU)()

    def begin(content, device):
        return partial(Breaking().keep, None)

    job = make_job(
        make_subject(find_code("tests.engine.probe_recipes:Sound"), TrainingSettings()), checkpoint_path="here"
    )
    written = CheckpointWriter(begin, job, 0, events.append)
    written.save(state)
    written.close()
    assert events == [CheckpointFailed("here: LookupError: no such bucket")]
