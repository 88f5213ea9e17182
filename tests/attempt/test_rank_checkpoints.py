"""A sharded training on many nodes goes on from what its ranks have put into the platform's storage."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from torch import distributed

from flyte_ddp.attempt import storage_folder
from flyte_ddp.attempt.checkpoints import checkpoint_store
from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine import worker
from flyte_ddp.engine.job import make_job, make_subject
from flyte_ddp.errors import RecoverableError
from flyte_ddp.events import (
    CheckpointRefused,
    CheckpointWritten,
    RunStarted,
    StepLogged,
)
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.manifest import read_manifest
from flyte_ddp.settings import RunOptions
from flyte_ddp.whole_files import content_digest
from tests.attempt.folders import Folders
from tests.engine.probe_recipes import Settings

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
    pytest.skip("sharding needs a newer torch", allow_module_level=True)

pytestmark = pytest.mark.slow
WHOLE = {"batch_size": 16, "validation_fraction": 0.2, "epochs": 2, "log_interval": 1}


class Unplugged(Exception):
    pass


class Rank:
    """The only rank of a training on nodes, with a platform; what it tells of itself, and its weights."""

    def __init__(
        self, platform, sharding="full", cut_at=(9, 0), watch=lambda event: None, keep_best=0, seconds=0.0, **settings
    ):
        self.told, self.weights, self.kept, self._cut_at, self._on_event = [], {}, {}, cut_at, watch
        subject = make_subject(find_code("tests.engine.sharding_recipes:Everything"), Settings(**{**WHOLE, **settings}))
        options = RunOptions(
            sharding=sharding, checkpoint_seconds=seconds, keep_best=keep_best, tracking="off", loader_workers=0
        )
        platform.root.mkdir(exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=platform.root))
        (own / "logs").mkdir()
        with checkpoint_store(platform, "key", resume=True, is_by_ranks=True) as store:
            job = make_job(subject, options, own / "model.pt", store.path, own / "logs")
            job = dataclasses.replace(job, storage=store)
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
        self._on_event(event)
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
    assert resumed.started > (0, 0)
    assert not [*host.iterdir()]
    for name, value in whole[sharding].items():
        assert torch.allclose(resumed.weights[name], value, rtol=1e-3, atol=1e-4)
        assert sharding == "off" or torch.equal(resumed.weights[name], value)
    stored = next_attempt.root / "1" / "checkpoints" / "checkpoint"
    assert (read_manifest(stored) is None) == (sharding == "off")


def test_an_attempt_that_ends_before_its_first_checkpoint_hands_on_where_the_last_one_is(next_attempt):
    assert Rank(next_attempt, cut_at=(0, 0)).started > (0, 0)
    assert not (next_attempt.root / "1" / "checkpoints" / "checkpoint").exists()
    later = Rank(Folders(next_attempt.root, attempt=2), cut_at=(0, 0))
    assert later.started > (0, 0)
    assert (next_attempt.root / "2" / "checkpoints" / "elsewhere").read_text() == f"{next_attempt.root}/0/checkpoints"


def flip(shard):
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 1
    shard.write_bytes(raw)


DAMAGE = {
    "flipped": (flip, "the checkpoint is damaged: 0.safetensors of its shards does not match its digest"),
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

    monkeypatch.setattr(storage_folder, "WAITS", (0.0,))
    with pytest.raises(RecoverableError, match=r"cannot read .*/0.safetensors: OSError: 503 Slow Down: check access"):
        Rank(Failing(next_attempt.root, attempt=1))
    assert Rank(Folders(next_attempt.root, attempt=2), cut_at=(0, 0)).started > (0, 0)
