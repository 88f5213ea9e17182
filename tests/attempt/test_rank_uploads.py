"""Ranks on many nodes upload sharded checkpoints while they train: slowly, not at all, or in another order."""

import json
import threading
from pathlib import Path

import pytest

from flyte_ddp.events import CheckpointFailed, CheckpointWritten, EpochFinished, StepLogged
from flyte_ddp.manifest import read_manifest
from tests.attempt.folders import Folders
from tests.attempt.test_rank_checkpoints import Rank, Unplugged, shards_of
from tests.attempt.test_sharded_checkpoints import Watched
from tests.commands import same

pytestmark = pytest.mark.slow


def test_an_upload_that_fails_leaves_the_last_whole_one_and_training_goes_on(tmp_path):
    """The storage takes the first three files: the third is a shard of the second checkpoint."""
    platform = Watched(tmp_path)
    platform.left = 3
    failed = threading.Event()

    def watch(event):
        if isinstance(event, CheckpointFailed):
            failed.set()
        elif isinstance(event, StepLogged) and failed.is_set():
            raise Unplugged

    rank = Rank(platform, cut_at=(1000, 0), watch=watch, epochs=1000)  # ended by watch, however long an upload takes
    (first,) = rank.of(CheckpointWritten)
    refused = rank.of(CheckpointFailed)[0]
    assert refused.reason.endswith("OSError: 503 Slow Down")
    assert any(isinstance(event, StepLogged) for event in rank.told[rank.told.index(refused) :])
    (shard,) = shards_of(platform)
    assert shard.parent.name.endswith("-0")
    content = json.loads((tmp_path / "0" / "checkpoints" / "checkpoint").read_bytes()[:-32])["content"]
    progress = dict(dict(content["dict"])["state"]["dict"])["progress"]
    assert ["step", first.step] in progress["dict"]


def test_the_best_models_are_there_as_soon_as_a_checkpoint_that_needs_them(tmp_path):
    """The storage takes nothing any more from the checkpoint on, or after it. What is uploaded before are the models.

    Checkpoints at the ends of epochs alone, since others come and are left out as the uploads take their time."""
    platform = Watched(tmp_path / "undisturbed")
    urls: list[str] = []
    platform.watch = lambda url: urls.append(url)
    undisturbed = Rank(platform, keep_best=2, seconds=3600).kept
    assert len(undisturbed) == 2
    first = next(number for number, url in enumerate(urls) if url.endswith("-best/0"))
    started = []
    assert urls[first + 2].endswith("/checkpoint"), "after the models' list"
    for puts in (first + 2, first + 3):
        platform = Watched(tmp_path / str(puts))
        platform.left = puts
        Rank(platform, cut_at=(1, 1), keep_best=2, seconds=3600)
        resumed = Rank(Folders(platform.root, attempt=1), keep_best=2, seconds=3600)
        assert resumed.kept.keys() == undisturbed.keys()
        assert all(same(resumed.kept[name], weights) for name, weights in undisturbed.items())
        started.append(resumed.started)
    assert [at >= (1, 0) for at in started] == [False, True]


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
