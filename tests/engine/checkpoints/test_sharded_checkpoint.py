"""A training that is sharded goes on from its checkpoint, in any way that its recipe can be trained."""

import shutil
from contextlib import suppress

import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.errors import InputError, RecoverableError
from flyte_ddp.events import StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.manifest import read_manifest, shards_beside
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import Settings
from tests.engine.sharding.sharded_runs import HERE, KINDS, WHOLE, Seen, assert_alike, interrupt, run
from tests.engine.sharding_recipes import Rotating
from tests.small_training import Unplugged


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The folder of a training on two ranks that was interrupted."""
    folder = tmp_path_factory.mktemp("cut")
    interrupt(folder, 5, "Undrawn", sharding="full", nproc=2, **WHOLE)
    manifest = read_manifest(folder / "checkpoint")
    assert manifest
    assert sorted(manifest["files"]) == ["0.safetensors", "1.safetensors"]
    return folder


def shards_of(folder):
    """Those of its checkpoint; beside them may be what is left of the next one."""
    manifest = read_manifest(folder / "checkpoint")
    assert manifest
    return shards_beside(folder / "checkpoint") / manifest["folder"]


def go_on(cut, folder, sharding, damage=None, left=10**9, **settings):
    """The training that goes on from a copy of the checkpoint, after this damage; and what is seen of it."""
    shutil.copytree(cut, folder)
    if damage:
        damage(shards_of(folder))
    seen = Seen(left)
    with suppress(Unplugged):
        return run("Undrawn", folder, sharding, watch=seen, **{**WHOLE, **settings}), seen
    return None, seen


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_it_is_read_on_one_rank_with_and_without_sharding(cut, tmp_path):
    whole = run("Undrawn", tmp_path / "whole", "off", **WHOLE)
    for sharding in KINDS:
        resumed, seen = go_on(cut, tmp_path / sharding, sharding)
        assert not seen.refused
        assert seen.started > (0, 2)
        assert_alike(resumed, whole)
        assert not shards_beside(tmp_path / sharding / "checkpoint").exists()


@pytest.mark.usefixtures("alone")
def test_a_buffer_may_be_of_a_type_that_safetensors_lacks(tmp_path):
    def unplug(event):  # not in the thread that writes a checkpoint
        if isinstance(event, StepLogged) and event.epoch:
            raise Unplugged

    with pytest.raises(Unplugged):
        run("Rotating", tmp_path / "cut", watch=unplug, seconds=0, epochs=4)
    for sharding in KINDS:
        folder, seen = tmp_path / sharding, Seen()
        shutil.copytree(tmp_path / "cut", folder)
        _, _, found = run("Rotating", folder, sharding, watch=seen, epochs=4)
        assert seen.started > (0, 0)
        assert not seen.refused
        expected = Rotating(None).model().rotations
        assert found["rotations"].dtype == torch.complex128
        assert torch.equal(found["rotations"], expected)
        assert torch.equal(found["rotation"], expected[1])


def flip(folder):
    shard = folder / "1.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 1
    shard.write_bytes(raw)


DAMAGE = {
    "flipped": (flip, "the checkpoint is damaged: 1.safetensors of its shards does not match its digest"),
    "missing": (lambda folder: (folder / "0.safetensors").unlink(), "0.safetensors of its shards cannot be read: No "),
    "short": (lambda folder: (folder / "0.safetensors").write_bytes(b"short"), "damaged: 0.safetensors of its shards"),
    "manifest": (
        lambda folder: (folder.parents[1] / "checkpoint").write_bytes(b"{" * 100),
        "its content does not match its checksum",
    ),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_training_starts_anew(cut, tmp_path, kind):
    damage, reason = DAMAGE[kind]
    _, seen = go_on(cut, tmp_path / "damaged", "full", damage, left=0)
    assert reason in seen.refused[0]
    assert seen.started == (0, 0)


@pytest.mark.usefixtures("alone")
def test_a_shard_that_cannot_be_read_now_is_no_damage(cut, tmp_path):
    def unplug_disk(folder):
        (folder / "1.safetensors").unlink()
        (folder / "1.safetensors").symlink_to("/proc/self/mem")  # where reading fails

    with pytest.raises(RecoverableError, match=r"1\.safetensors, a file of the checkpoint, cannot be read: Input"):
        go_on(cut, tmp_path / "unplugged", "full", unplug_disk, left=0)


def test_damage_to_an_earlier_attempts_checkpoint_is_not_to_the_one_given(cut, tmp_path):
    shutil.copytree(cut, tmp_path / "damaged")
    flip(shards_of(tmp_path / "damaged"))
    subject = make_subject(find_code(f"{HERE}:Undrawn"), Settings(log_interval=1, **WHOLE))
    job = job_in(tmp_path / "damaged", subject, RunOptions(sharding="full", loader_workers=0, checkpoint_seconds=0))
    seen, target = Seen(left=0), "tests.engine.sharding_targets:train_on_a_checkpoint_of_its_own"
    with pytest.raises(Unplugged):
        launcher.launch(target, World(2, 2, "gloo", "cpu"), job, 60, seen)
    assert seen.refused == [DAMAGE["flipped"][1]]
    assert seen.started == (0, 0)


@pytest.mark.usefixtures("alone")
def test_that_of_another_training_is_refused(cut, tmp_path):
    with pytest.raises(InputError, match="there belongs to another training: its seed was 1, now it is 7"):
        go_on(cut, tmp_path / "other", "full", left=0, seed=7)
