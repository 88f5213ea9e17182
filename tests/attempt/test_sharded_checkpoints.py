"""A sharded checkpoint in a platform's storage is the last whole one, whatever happens to the upload of the next."""

import hashlib
import itertools
import shutil
import threading
from pathlib import Path

import pytest
import torch

from flyte_ddp.attempt.checkpoints import checkpoint_store
from flyte_ddp.attempt.platform_training import Training
from flyte_ddp.attempt.trained import Trained
from flyte_ddp.code.user_code import find_code
from flyte_ddp.events import CheckpointWritten
from flyte_ddp.manifest import read_manifest, shards_beside, write_manifest
from flyte_ddp.settings import RunOptions
from tests.attempt.folders import Folders, OnFolders
from tests.engine.probe_recipes import Settings

FILES = "0.safetensors", "1.safetensors"


class Watched(Folders):
    """Calls watch before each put of a file of a checkpoint, and takes so many that are left."""

    left, watch = 10**9, staticmethod(lambda url: None)

    def put(self, path, url):
        if "/checkpoints/" in url:
            self.watch(url)
            self.left -= 1
            if self.left < 0:
                raise OSError("503 Slow Down")
        super().put(path, url)


def write(path, step):
    """What ranks leave at the path; an older one is removed."""
    folder = shards_beside(path) / f"0-{step}"
    folder.mkdir(parents=True)
    digests = {}
    for name in FILES:
        (folder / name).write_text(f"{name} of {step}")
        digests[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    older = [other for other in folder.parent.iterdir() if other != folder]
    write_manifest(path, {"folder": folder.name, "files": digests, "step": step})
    for other in older:
        shutil.rmtree(other)


def written(store, step):
    """That ranks have written one."""
    write(store.path, step)
    store.on_checkpoint_written(CheckpointWritten(0, step, str(store.path), 0.0, 0.0))


def whole(path):
    """The step of the checkpoint at the path, all of which is there; 0 without one."""
    if not path.exists():
        return 0
    manifest = read_manifest(path)
    assert manifest
    for name, digest in manifest["files"].items():
        content = (shards_beside(path) / manifest["folder"] / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
    return manifest["step"]


def restored(root, attempt):
    """The step of the checkpoint that an attempt begins with."""
    with checkpoint_store(Folders(root, attempt), "key", resume=True) as store:
        return whole(store.path)


def test_each_attempt_begins_with_the_newest_and_hands_it_on(tmp_path):
    with checkpoint_store(Folders(tmp_path), "key", resume=True) as store:
        for step in (1, 2, 3):
            written(store, step)
    with checkpoint_store(Folders(tmp_path, attempt=1), "key", resume=True) as store:
        assert whole(store.path) == 3
        written(store, 4)
    assert restored(tmp_path, 2) == restored(tmp_path, 3) == 4
    stored = whole(tmp_path / "3" / "checkpoints" / "checkpoint")
    assert stored == 4


def test_an_upload_that_ends_anywhere_leaves_the_last_whole_one(tmp_path):
    """From its n-th put on, the storage takes nothing."""
    found = set()
    for puts in itertools.count():
        root = tmp_path / str(puts)
        platform = Watched(root)
        with checkpoint_store(platform, "key", resume=True) as store:
            written(store, 1)
        shutil.rmtree(root / "pod-0")  # as it is when the pod starts again
        platform.left = puts
        with checkpoint_store(platform, "key", resume=True) as store:
            assert whole(store.path) == 1
            written(store, 2)
        found.add(restored(root, 1))
        if platform.left >= 0:
            break
    assert found == {1, 2}
    assert restored(root, 1) == 2
    assert puts >= 3


def test_one_that_is_replaced_while_it_is_uploaded_arrives_whole(tmp_path):
    platform, stored = Watched(tmp_path), tmp_path / "0" / "checkpoints" / "checkpoint"
    steps, seen, is_last = iter(range(2, 5)), [], threading.Event()

    def watch(url):
        seen.append(whole(stored))
        if url.endswith("/0.safetensors"):
            if step := next(steps, 0):
                written(store, step)
            else:
                is_last.set()

    platform.watch = watch
    with checkpoint_store(platform, "key", resume=True) as store:
        written(store, 1)
        assert is_last.wait(60)
    assert whole(stored) == 4
    assert {0, 1, 2, 3} <= {*seen}
    assert len([*shards_beside(stored).iterdir()]) == 2, "the names are used again"


class Sharded(OnFolders, Training[Path, Trained]):
    def __init__(self, platform):
        super().__init__(find_code("tests.engine.sharding_recipes:Everything"))
        self.platform = platform


@pytest.mark.slow
def test_an_attempt_on_other_ranks_goes_on_from_the_shards_of_the_one_before(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("sharding needs a newer torch")
    settings = Settings(batch_size=32, epochs=2)
    models = []
    for attempt, nproc in enumerate((2, 3)):
        options = RunOptions(nproc=nproc, sharding="full", tracking="off", loader_workers=0)
        models.append(torch.load(Sharded(Folders(tmp_path, attempt)).run(settings, options).model, weights_only=True))
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    log = (tmp_path / "1" / "logs" / "console.log").read_text()
    assert "resuming from the checkpoint" in log
    assert "Train Epoch" not in log
    shards = tmp_path / "0" / "checkpoints" / "checkpoint-shards"
    assert {file.name for file in shards.rglob("*") if file.is_file()} == {*FILES}
