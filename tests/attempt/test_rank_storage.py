"""Checkpoints of a sharded training on many nodes, whose ranks speak to the platform's storage themselves."""

import dataclasses
import json
import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

from benchmarks import lost_nodes
from flyte_ddp.attempt import checkpoints
from flyte_ddp.attempt.checkpoints import checkpoint_store
from flyte_ddp.attempt.rank_storage import PlatformRankStorage, StoreOfRanks
from flyte_ddp.engine import worker
from flyte_ddp.engine.job import job_of, subject_of
from flyte_ddp.errors import RecoverableError
from flyte_ddp.events import (
    CheckpointFailed,
    CheckpointRefused,
    CheckpointWritten,
    EpochFinished,
    RunStarted,
    StepLogged,
)
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.manifest import read_manifest
from flyte_ddp.settings import RunOptions
from flyte_ddp.storage import content_digest
from flyte_ddp.user_code import find_code
from tests.attempt.test_sharded_checkpoints import Sharded, Watched
from tests.attempt.test_training import Folders
from tests.commands import same
from tests.engine.probe_recipes import Settings

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
    pytest.skip("sharding needs a newer torch", allow_module_level=True)

WHOLE = {"batch_size": 32, "validation_fraction": 0.2, "epochs": 2, "log_interval": 1}


class Unplugged(Exception):
    pass


class Rank:
    """The only rank of a training on nodes, with a platform; what it tells of itself, and its weights."""

    def __init__(self, platform, sharding="full", cut_at=(9, 0), watch=lambda event: None, keep_best=0, **settings):
        self.told, self.weights, self.kept, self._cut_at, self._look = [], {}, {}, cut_at, watch
        subject = subject_of(find_code("tests.engine.sharding_recipes:Everything"), Settings(**{**WHOLE, **settings}))
        options = RunOptions(
            sharding=sharding, checkpoint_seconds=0, keep_best=keep_best, tracking="off", loader_workers=0
        )
        platform.root.mkdir(exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=platform.root))
        (own / "logs").mkdir()
        storage = PlatformRankStorage(platform, own / "checkpoint")
        with checkpoint_store(platform, "key", resume=True, stored=partial(StoreOfRanks, ranks=storage)) as store:
            job = job_of(subject, options, own / "model.pt", store.path, own / "logs")
            job = dataclasses.replace(job, storage=storage)
            environment = Environment(World(1, 1, "gloo", "cpu"), 0, 0, f"file://{own}/rendezvous", 1)
            try:
                worker.run(environment, DirectLink(self._watch), job)
                self.weights = torch.load(own / "model.pt", weights_only=True)
                self.kept = {file.name: torch.load(file, weights_only=True) for file in (own / "logs").glob("best-*")}
            except Unplugged:
                pass
            finally:
                if distributed.is_initialized():
                    distributed.destroy_process_group()

    def _watch(self, event):
        self.told.append(event)
        self._look(event)
        if isinstance(event, StepLogged) and (event.epoch, event.step) >= self._cut_at:
            raise Unplugged

    def of(self, kind):
        return [event for event in self.told if isinstance(event, kind)]

    @property
    def started(self):
        (event,) = self.of(RunStarted)
        return event.first_epoch, event.first_step


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The root of a platform on which an attempt ended in the second epoch."""
    root = tmp_path_factory.mktemp("cut")
    written = Rank(Folders(root), cut_at=(1, 3)).of(CheckpointWritten)
    assert written
    return root


@pytest.fixture
def next_attempt(cut, tmp_path):
    """Its platform for the attempt after that one."""
    shutil.copytree(cut, tmp_path / "root")
    return Folders(tmp_path / "root", attempt=1)


def shards_of(platform, attempt=0):
    """The files of the checkpoint that an attempt has left whole in the storage."""
    folder = platform.root / str(attempt) / "checkpoints"
    manifest = read_manifest(folder / "checkpoint")
    assert manifest
    assert "url" not in manifest
    files = {folder / "checkpoint-shards" / manifest["folder"] / name: told for name, told in manifest["files"].items()}
    assert all(content_digest(file) == digest for file, digest in files.items())
    return [*files]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {kind: Rank(Folders(tmp_path_factory.mktemp(kind)), kind).weights for kind in ("full", "off")}


@pytest.mark.parametrize("sharding", ["full", "off"])
def test_the_next_attempt_goes_on_with_or_without_sharding_and_leaves_nothing_on_the_disk(
    next_attempt, whole, sharding, monkeypatch
):
    host = next_attempt.root / "host"
    host.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(host))
    resumed = Rank(next_attempt, sharding)
    assert not resumed.of(CheckpointRefused)
    assert resumed.started >= (1, 0)
    assert not [*host.iterdir()]
    for name, value in whole[sharding].items():
        assert torch.allclose(resumed.weights[name], value, rtol=1e-3, atol=1e-4)
        assert sharding == "off" or torch.equal(resumed.weights[name], value)
    stored = next_attempt.root / "1" / "checkpoints" / "checkpoint"
    assert (read_manifest(stored) is None) == (sharding == "off")


def test_an_attempt_that_ends_before_its_first_checkpoint_hands_on_where_the_last_one_is(next_attempt):
    assert Rank(next_attempt, cut_at=(0, 0)).started >= (1, 0)
    assert not (next_attempt.root / "1" / "checkpoints" / "checkpoint").exists()
    later = Rank(Folders(next_attempt.root, attempt=2), cut_at=(0, 0))
    assert later.started >= (1, 0)
    assert (next_attempt.root / "2" / "checkpoints" / "elsewhere").read_text() == f"{next_attempt.root}/0/checkpoints"


def flip(shard):
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 1
    shard.write_bytes(raw)


DAMAGE = {
    "flipped": (flip, "the checkpoint is damaged: 0.safetensors of its shards does not match its digest"),
    "short": (lambda shard: shard.write_bytes(b"short"), "the checkpoint is damaged: 0.safetensors of its shards"),
    "missing": (Path.unlink, "the checkpoint is incomplete: 0.safetensors of its shards is not in the storage"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_training_starts_anew(next_attempt, kind):
    damage, reason = DAMAGE[kind]
    damage(*shards_of(next_attempt))
    resumed = Rank(next_attempt, cut_at=(0, 0))
    assert [event.reason.startswith(reason) for event in resumed.of(CheckpointRefused)] == [True]
    assert resumed.started == (0, 0)


def test_a_manifest_that_was_changed_or_is_of_another_training_is_refused(next_attempt):
    resumed = Rank(next_attempt, cut_at=(0, 0), seed=7)
    (refused,) = resumed.of(CheckpointRefused)
    assert refused.reason == "the checkpoint belongs to another training: its seed was 1, now it is 7"
    stored = next_attempt.root / "0" / "checkpoints" / "checkpoint"
    assert b'"each": 10' in stored.read_bytes()
    stored.write_bytes(stored.read_bytes().replace(b'"each": 10', b'"each": 11', 1))
    (refused,) = Rank(next_attempt, cut_at=(0, 0)).of(CheckpointRefused)
    assert "its content does not match its checksum" in refused.reason


def test_storage_that_cannot_be_read_ends_the_attempt_and_loses_nothing(next_attempt, monkeypatch):
    class Failing(Folders):
        def get(self, url, path):
            if url.endswith(".safetensors"):
                raise OSError("503 Slow Down")
            super().get(url, path)

    monkeypatch.setattr(checkpoints, "WAITS", (0.0,))
    with pytest.raises(RecoverableError, match=r"cannot read .*/0.safetensors: OSError: 503 Slow Down: check access"):
        Rank(Failing(next_attempt.root, attempt=1))
    assert Rank(Folders(next_attempt.root, attempt=2), cut_at=(0, 0)).started >= (1, 0)


def test_an_upload_that_fails_leaves_the_last_whole_one_and_training_goes_on(tmp_path):
    """The storage takes the first three files: the third is a shard of the second checkpoint."""
    platform = Watched(tmp_path)
    platform.left = 3
    rank = Rank(platform, cut_at=(1, 3))
    (first,) = rank.of(CheckpointWritten)
    assert rank.of(CheckpointFailed)[0].reason.endswith("OSError: 503 Slow Down")
    assert (rank.of(StepLogged)[-1].epoch, rank.of(StepLogged)[-1].step) == (1, 3)
    (shard,) = shards_of(platform)
    assert shard.parent.name.endswith("-0")
    content = json.loads((tmp_path / "0" / "checkpoints" / "checkpoint").read_bytes()[:-32])["content"]
    assert ["step", first.step] in dict(content["dict"])["state"]["dict"]


def test_the_best_models_are_there_as_soon_as_a_checkpoint_that_needs_them(tmp_path):
    """The storage takes nothing any more when the first of them is uploaded, its list, the checkpoint, or later."""
    platform = Watched(tmp_path / "undisturbed")
    urls: list[str] = []
    platform.watch = lambda url: urls.append(url)
    undisturbed = Rank(platform, keep_best=2).kept
    assert len(undisturbed) == 2
    first = next(number for number, url in enumerate(urls) if url.endswith("-best/0"))
    started = []
    for puts in range(first, first + 4):
        platform = Watched(tmp_path / str(puts))
        platform.left = puts
        Rank(platform, cut_at=(1, 1), keep_best=2)
        resumed = Rank(Folders(platform.root, attempt=1), keep_best=2)
        assert resumed.kept.keys() == undisturbed.keys()
        assert all(same(resumed.kept[name], weights) for name, weights in undisturbed.items())
        started.append(resumed.started)
    assert [at >= (1, 0) for at in started] == [False, False, False, True]


def test_a_plain_checkpoint_that_uploads_slowly_does_not_take_the_place_of_a_sharded_one(tmp_path):
    """Each attempt begins with that of the one before, which is handed on while the ranks train."""
    Rank(Folders(tmp_path), "off", cut_at=(0, 2))
    sharded = threading.Event()

    class Slow(Folders):
        def put(self, path, url):
            if url.endswith("/checkpoint") and not read_manifest(Path(path)):
                sharded.wait(2)  # if that is not waited for, it arrives in this time
            super().put(path, url)

    def watch(event):
        if isinstance(event, CheckpointWritten):
            sharded.set()

    platform = Slow(tmp_path, attempt=1)
    (*_, last) = Rank(platform, cut_at=(1, 3), watch=watch).of(CheckpointWritten)
    assert shards_of(platform, attempt=1)
    assert Rank(Folders(tmp_path, attempt=2), cut_at=(0, 0)).started == (last.epoch, last.step)


def test_training_does_not_wait_for_a_slow_upload_but_for_the_last_one(tmp_path):
    """The first file arrives only in the second epoch."""
    arrives = threading.Event()

    class Slow(Folders):
        def put(self, path, url):
            if url.endswith(".safetensors"):
                assert arrives.wait(60)
            super().put(path, url)

    def watch(event):
        if isinstance(event, StepLogged) and (event.epoch, event.step) == (1, 3):
            arrives.set()

    rank = Rank(Slow(tmp_path), watch=watch)
    first, *_, last = ((event.epoch, event.step) for event in rank.of(CheckpointWritten))
    assert first == (0, 1)
    assert last == (2, 0)
    assert rank.told.index(rank.of(EpochFinished)[0]) < rank.told.index(rank.of(CheckpointWritten)[0])
    assert (1, 0) not in [(event.epoch, event.step) for event in rank.of(CheckpointWritten)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a training on two nodes."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert lost_nodes.attempt(root, 0, epochs=2) == [0, 0]
    return torch.load(root / "model.pt", weights_only=True)


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """The root of a platform on which an attempt ended as it lost a node."""
    root = tmp_path_factory.mktemp("lost")
    assert 0 not in lost_nodes.attempt(root, 0, epochs=2, victim=1, operation=40)
    return root


@pytest.mark.slow
def test_a_training_that_loses_a_node_while_it_uploads_ends_with_the_same_bits(lost, tmp_path, undisturbed):
    assert lost_nodes.check_whole(lost, 0)
    shutil.copytree(lost / "0", tmp_path / "0")
    assert lost_nodes.attempt(tmp_path, 1, epochs=2) == [0, 0]
    assert "resuming from the checkpoint" in lost_nodes.logged(tmp_path, 1)
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), undisturbed)


@pytest.mark.slow
def test_one_node_goes_on_from_the_files_of_two(lost, tmp_path, undisturbed):
    settings = Settings(**{**lost_nodes.SETTINGS, "epochs": 2})
    for sharding, nproc in (("full", 2), ("off", 1)):
        shutil.copytree(lost / "0", tmp_path / sharding / "0")
        options = RunOptions(nproc=nproc, sharding=sharding, tracking="off", loader_workers=0)
        model = Sharded(Folders(tmp_path / sharding, attempt=1)).run(settings, options).model
        found = torch.load(model, weights_only=True)
        assert "resuming from the checkpoint" in (tmp_path / sharding / "1" / "logs" / "console.log").read_text()
        assert sharding == "off" or same(found, undisturbed)
        assert all(torch.allclose(found[name], value, rtol=1e-3, atol=1e-4) for name, value in undisturbed.items())
