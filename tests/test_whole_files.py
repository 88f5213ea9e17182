"""Disks that are full, read-only or not there."""

import os
import tempfile
from pathlib import Path

import pytest

from flyte_ddp.attempt.platform_storage import folder_digest
from flyte_ddp.code.user_code import find_code
from flyte_ddp.data.remote_files import Stored
from flyte_ddp.engine.job import compute_data_digest, make_subject
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointFailed
from flyte_ddp.flyte1 import platform
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.whole_files import absolute, content_digest, writing_to
from tests.commands import unreadable


def test_a_full_disk_for_checkpoints_does_not_stop_training(train):
    target = "tests.launch.targets:train_on_a_full_disk"
    trained = train(2, epochs=2, batch_size=64, checkpoint_seconds=0, keep_checkpoint=False, target=target)
    failed = [event for event in trained.events if isinstance(event, CheckpointFailed)]
    assert failed
    assert all("File too large" in event.reason for event in failed)
    assert sorted(path.name for path in trained.folder.iterdir()) == ["model.pt", "predictions.npy"]


def test_a_folder_that_cannot_be_is_one_clear_error():
    answer = r"cannot write to /dev/null/here: Not a directory; .*set DDP_RUNS_DIR"
    with pytest.raises(InputError, match=answer), writing_to("/dev/null/here", "DDP_RUNS_DIR"):
        Path("/dev/null/here").mkdir(parents=True)


@pytest.mark.parametrize("closed", ["", "below", "below/file"])
def test_data_that_may_not_be_read_are_named(closed):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # others may list what is below /tmp
        Path(folder, "below").mkdir()
        Path(folder, "below", "file").touch()
        os.chmod(folder, 0o755)
        message = f"{Path(folder, closed)}.* may not be read: allow it"
        with unreadable(Path(folder, closed)), pytest.raises(InputError, match=message):
            compute_data_digest(Path(folder))


@pytest.mark.parametrize("closed", ["", "config.json"])
def test_a_folder_of_weights_that_may_not_be_read_is_named(closed):
    code = find_code("tests.engine.probe_recipes:Sound")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "config.json").write_text("{}")
        os.chmod(folder, 0o755)
        message = f"{folder}/config.json may not be read: allow it"
        with unreadable(Path(folder, closed)), pytest.raises(InputError, match=message):
            make_subject(code, TrainingSettings(), init=Path(folder))


def test_what_links_lead_to_belongs_to_a_folder(tmp_path):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    file = elsewhere / "file"
    file.write_text("one")
    (folder / "of a folder").symlink_to(elsewhere)
    (folder / "of a file").symlink_to(file)
    found = {"of a folder/file", "of a file"}
    for url in (folder, f"file://{folder}/", f"{tmp_path}//folder", f"{tmp_path}/./folder", f"{folder}/../folder"):
        assert Stored(url).sizes() == dict.fromkeys(found, 3)
    assert Stored(file).sizes() == {"": 3}
    assert Stored(tmp_path / "nothing").sizes() == {}
    before = content_digest(folder), folder_digest(platform, str(folder))
    file.write_text("three")  # of another length: within a tick of the clock it would have the same time
    after = content_digest(folder), folder_digest(platform, str(folder))
    assert not {*before} & {*after}


def test_links_in_a_circle_are_refused(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "on").symlink_to(two)
    (two / "back").symlink_to(one)
    for read in content_digest, lambda folder: Stored(folder).sizes():
        with pytest.raises(InputError, match=rf"{one}/on/back leads to {one}, in which it is itself: remove that link"):
            read(one)


def test_a_place_below_no_home_or_current_folder_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"no home folder for ~nobody-of-this-name/out: set output to an absol"):
        absolute("~nobody-of-this-name/out", "output")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert absolute(tmp_path, "output") == tmp_path
    with pytest.raises(InputError, match=r"the current folder has been removed: change to one that is there \(cd\)"):
        absolute("out", "output")
