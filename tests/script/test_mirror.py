"""A script's checkpoints in the storage: whole ones, whatever happens meanwhile."""

import math
import os
import shutil
import socket
from pathlib import Path

import pytest

from flyte_ddp.attempt.checkpoints import PlatformStore, point_to
from flyte_ddp.errors import InputError
from flyte_ddp.manifest import read_manifest, write_manifest
from flyte_ddp.script.mirror import QUIET_SECONDS, CheckpointMirror
from tests.attempt.folders import Folders


def refusing(put, refuses):
    """Platform.put, without the uploads for which refuses(path, url) is true."""

    def refuse(path, url):
        if refuses(Path(path), url):
            raise OSError("the storage is away")
        put(path, url)

    return refuse


class Attempt:
    """The mirror of one attempt, with a clock of its own."""

    def __init__(self, root: Path, number: int = 0):
        self.platform = Folders(root, number)
        self.store = PlatformStore(self.platform, is_by_ranks=True)
        self.store.restore(resume=True)
        self.folder = self.platform.working_folder() / "script"
        self.folder.mkdir()
        self.time = 0.0
        self.mirror = CheckpointMirror(self.platform, self.folder, self.store.path, self.store, lambda: self.time)
        self.mirror.restore()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            path = self.folder / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    def upload(self) -> None:
        self.look()
        self.look()

    def look(self, seconds: float = QUIET_SECONDS) -> None:
        self.time += seconds
        self.mirror.upload_quiet()

    def found(self) -> dict[str, str]:
        """What a next attempt finds."""
        return files_in(Attempt(self.platform.root, self.platform.attempt + 1).folder)


def files_in(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path)


def test_a_file_that_is_still_written_is_never_taken(attempt):
    attempt.write(ckpt="ha")
    attempt.look()
    attempt.write(ckpt="half")
    attempt.look()
    assert not attempt.store.path.exists(), "it was another one at each look"
    attempt.look()
    assert attempt.mirror.step == 0
    assert files_in(Path(attempt.store.url) / "files") == {"0": "half"}, "quiet files are taken for whole ones"


def test_a_file_that_is_rewritten_in_place_is_found_as_it_was(attempt):
    attempt.write(ckpt="first")
    attempt.look()
    attempt.look()
    attempt.write(ckpt="sec")
    attempt.look()
    assert attempt.found() == {"ckpt": "first"}


def test_a_folder_is_taken_as_a_whole_even_beside_a_log_that_always_grows(attempt):
    attempt.write(step1__model="m1", step1__optimizer="o1", log="x")
    attempt.look()
    attempt.write(log="xx")
    attempt.look()
    attempt.write(log="xxx", step2__model="m2")
    attempt.look()
    attempt.write(log="xxxx", step2__optimizer="o2")
    attempt.look()
    assert attempt.found() == {"step1/model": "m1", "step1/optimizer": "o1"}


def test_the_last_checkpoint_stays_until_the_next_one_is_there(attempt):
    attempt.write(step1__model="m1")
    attempt.look()
    attempt.look()
    attempt.write(step2__model="m2")
    (attempt.folder / "step1" / "model").unlink()
    attempt.look()
    attempt.write(step2__model="m2, and more")
    attempt.look()
    assert set(named(attempt)) == {"step1/model"}
    attempt.look()
    assert set(named(attempt)) == {"step2/model"}
    (attempt.folder / "step2" / "model").unlink()
    attempt.look()
    attempt.look()
    assert attempt.found() == {"step2/model": "m2, and more"}, "an empty folder says nothing"


def named(attempt: Attempt) -> dict[str, str]:
    manifest = read_manifest(Path(attempt.store.url) / "checkpoint")
    assert manifest is not None
    objects: dict[str, str] = manifest["objects"]
    return objects


def stored(attempt: Attempt) -> dict[str, str]:
    return {name: Path(url).read_text() for name, url in named(attempt).items()}


def test_no_object_is_replaced_that_the_manifest_in_the_storage_names(attempt):
    for number in range(4):
        attempt.write(ckpt=f"version {number}")
        before = Path(attempt.store.url, "checkpoint")
        url = named(attempt)["ckpt"] if before.exists() else ""
        content = Path(url).read_text() if url else ""
        attempt.look()
        attempt.look()
        assert named(attempt)["ckpt"] != url
        assert not url or Path(url).read_text() == content
    assert len(files_in(Path(attempt.store.url) / "files")) == 2, "names are used again"


def test_a_manifest_that_does_not_arrive_leaves_the_one_before(attempt):
    attempt.write(ckpt="first")
    attempt.upload()
    put = attempt.platform.put
    attempt.platform.put = refusing(put, lambda _, url: url.endswith("/checkpoint"))
    for text in ("second", "third"):
        attempt.write(ckpt=text)
        attempt.look()
        with pytest.raises(OSError, match="the storage is away"):
            attempt.look()
    assert attempt.found() == {"ckpt": "first"}
    attempt.platform.put = put
    attempt.look()
    assert Attempt(attempt.platform.root, 2).folder  # an attempt between them has found it, and uploads nothing
    assert named(attempt)["ckpt"] != ""


def test_at_the_end_everything_is_taken(attempt):
    attempt.write(ckpt="last", step1__model="m1")
    attempt.mirror.upload_quiet(math.inf)
    assert attempt.found() == {"ckpt": "last", "step1/model": "m1"}


def test_ranks_that_start_again_find_no_half_of_a_file(attempt):
    attempt.write(ckpt="whole", other="kept")
    attempt.look()
    attempt.look()
    attempt.write(ckpt="wh", new="half of ")
    attempt.mirror.restore()
    assert files_in(attempt.folder) == {"ckpt": "whole", "other": "kept"}


def test_a_third_attempt_finds_what_the_first_has_left_and_uploads_only_news(attempt, tmp_path):
    attempt.write(ckpt="first", other="kept")
    attempt.look()
    attempt.look()
    second = Attempt(tmp_path, 1)
    second.look()
    assert not Path(second.store.url, "files").exists()
    third = Attempt(tmp_path, 2)
    assert files_in(third.folder) == {"ckpt": "first", "other": "kept"}
    third.write(ckpt="third")
    third.look()
    third.look()
    assert files_in(Path(third.store.url) / "files") == {"0": "third"}
    assert third.found() == {"ckpt": "third", "other": "kept"}


def test_the_checkpoint_of_another_training_is_refused(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoint").write_bytes(b"the checkpoint of a recipe")
    point_to(Folders(tmp_path), str(other))
    with pytest.raises(InputError, match="resume_from must be the checkpoint folder of a script's"):
        Attempt(tmp_path, 1)


def test_a_manifest_leads_nowhere_else(attempt, tmp_path):
    attempt.write(ckpt="first")
    attempt.look()
    attempt.look()
    place = Path(attempt.store.url, "checkpoint")
    manifest = read_manifest(place) or {}
    objects, versions = ({"../outside": manifest[what]["ckpt"]} for what in ("objects", "versions"))
    write_manifest(place, {**manifest, "objects": objects, "versions": versions})
    with pytest.raises(InputError, match="got one of another training"):
        Attempt(tmp_path, 1)
    assert not (tmp_path / "pod-1" / "outside").exists()


def test_ranks_that_start_again_find_no_empty_folder(attempt):
    attempt.write(step1__model="m1")
    attempt.upload()
    attempt.write(step2__model="half of")
    (attempt.folder / "step1" / "model").unlink()
    (attempt.folder / "step1" / "model").mkdir()
    attempt.mirror.restore()
    assert [path.name for path in attempt.folder.iterdir()] == ["step1"]
    assert files_in(attempt.folder) == {"step1/model": "m1"}


def test_ranks_that_start_again_before_the_manifest_has_arrived_replace_nothing_that_it_names(attempt):
    attempt.write(ckpt="first")
    attempt.upload()
    put = attempt.platform.put
    attempt.platform.put = refusing(put, lambda _, url: url.endswith("/checkpoint"))
    attempt.write(ckpt="second")
    attempt.look()
    with pytest.raises(OSError, match="the storage is away"):
        attempt.look()
    attempt.mirror.restore()
    assert files_in(attempt.folder) == {"ckpt": "first"}, "as a next pod finds it"
    attempt.write(ckpt="third")
    attempt.look()
    with pytest.raises(OSError, match="the storage is away"):
        attempt.look()
    assert attempt.found() == {"ckpt": "first"}
    attempt.platform.put = put
    attempt.look()
    assert Attempt(attempt.platform.root, 2).folder
    assert Path(named(attempt)["ckpt"]).read_text() == "third", "it is tried again"


def test_links_are_kept_and_never_followed(attempt, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "samples").write_text("of the user's own")
    attempt.write(step1__model="m1")
    (attempt.folder / "latest").symlink_to(attempt.folder / "step1")
    (attempt.folder / "data").symlink_to(tmp_path / "data")
    (attempt.folder / "round").symlink_to(".")
    attempt.upload()
    assert set(named(attempt)) == {"step1/model"}
    attempt.write(step2__model="m2")
    (attempt.folder / "latest").unlink()
    (attempt.folder / "latest").symlink_to("step2")
    attempt.mirror.restore()
    assert (attempt.folder / "latest" / "model").read_text() == "m1"
    assert (tmp_path / "data" / "samples").read_text() == "of the user's own"
    second = Attempt(tmp_path, 1)
    assert os.readlink(second.folder / "latest") == "step1"
    assert (second.folder / "latest" / "model").read_text() == "m1"


def test_a_folder_that_has_become_a_link_is_restored_beside_what_the_link_leads_to(attempt):
    attempt.write(latest__model="m1")
    attempt.upload()
    (attempt.folder / "latest").rename(attempt.folder / "step1")
    (attempt.folder / "latest").symlink_to("step1")
    attempt.write(step1__model="m2")
    attempt.mirror.restore()
    assert files_in(attempt.folder) == {"latest/model": "m1"}


def test_one_bad_entry_keeps_no_earlier_one_from_its_upload_and_fills_no_storage(attempt):
    attempt.platform.put = refusing(attempt.platform.put, lambda path, _: path.name == "bad")
    os.mkfifo(attempt.folder / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(attempt.folder, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
        attempt.write(alone__a_first="1", alone__bad="2", ckpt="whole")
        os.utime(attempt.folder / "ckpt", (1000, 1000))
        attempt.look()
        for _ in range(3):
            with pytest.raises(OSError, match=r"alone: .*the storage is away"):
                attempt.look()
    assert attempt.found() == {"ckpt": "whole"}
    assert len(files_in(Path(attempt.store.url) / "files")) == 2, "alone/a_first and ckpt, once each"


def test_a_file_that_names_a_checkpoint_never_overtakes_it(attempt):
    attempt.platform.put = refusing(attempt.platform.put, lambda path, _: path.name == "model")
    attempt.write(old="x", step1__model="much larger", latest="step1", zzz="later")
    for time, name in ((1000, "old"), (2000, "step1/model"), (2000, "latest"), (2001, "zzz")):  # its clock is coarse
        os.utime(attempt.folder / name, (time, time))
    attempt.look()
    with pytest.raises(OSError, match=r"step1: .*away; later ones wait until it is uploaded or removed"):
        attempt.look()
    assert stored(attempt) == {"old": "x"}
    (attempt.folder / "step1" / "model").unlink()
    attempt.look()
    assert stored(attempt) == {"old": "x", "latest": "step1", "zzz": "later"}


def test_a_checkpoint_that_the_script_has_removed_stays_while_the_next_one_fails(attempt):
    attempt.write(step1__model="m1", latest="step1")
    attempt.upload()
    attempt.platform.put = refusing(attempt.platform.put, lambda path, _: path.name == "model")
    (attempt.folder / "step1" / "model").unlink()
    attempt.write(step2__model="m2", latest="step2", log="x")
    for seconds, name in enumerate(("log", "step2/model", "latest")):
        os.utime(attempt.folder / name, (3000 + seconds, 3000 + seconds))
    attempt.look()
    for until in (0.0, math.inf):
        attempt.time += QUIET_SECONDS
        with pytest.raises(OSError, match=r"step2: "):
            attempt.mirror.upload_quiet(until)
        assert stored(attempt) == {"step1/model": "m1", "latest": "step1", "log": "x"}


def test_uploads_that_last_longer_than_the_script_keeps_a_checkpoint_arrive(attempt):
    put = attempt.platform.put
    number = 0

    def save() -> None:
        nonlocal number
        for path in attempt.folder.glob("step*"):
            shutil.rmtree(path)
        number += 1
        attempt.write(**{f"step{number}__model": f"m{number}", f"step{number}__optimizer": f"o{number}"})

    def save_meanwhile(path, url):
        if Path(path).name == "model":
            save()
        put(path, url)

    attempt.platform.put = save_meanwhile
    save()
    for _ in range(5):
        done = number
        attempt.upload()
        assert stored(attempt) == {f"step{done}/model": f"m{done}", f"step{done}/optimizer": f"o{done}"}
    assert number == 6
    assert len(files_in(Path(attempt.store.url) / "files")) <= 4, "names are used again"
    assert {path.name for path in attempt.folder.parent.iterdir()} == {"script", "checkpoint"}


def test_a_file_that_is_rewritten_during_its_upload_is_not_taken_even_if_it_is_gone_then(attempt, capsys):
    put = attempt.platform.put

    def rewrite(path, url):
        if Path(path).name == "last":
            attempt.write(last="half of another")
            put(path, url)
            (attempt.folder / "last").unlink()
            attempt.time += 200
        else:
            put(path, url)

    attempt.platform.put = rewrite
    for text in ("first", "second", "third"):
        attempt.write(last=text, other=text)
        attempt.upload()
        assert stored(attempt) == {"other": text}
    assert len(files_in(Path(attempt.store.url) / "files")) <= 3, "names are used again"


def test_a_file_that_changes_during_each_upload_is_named_once(attempt, capsys):
    put = attempt.platform.put

    def append(path, url):
        put(path, url)
        if Path(path).name == "last":
            with open(attempt.folder / "last", "a") as file:
                file.write("more")
            attempt.time += 200

    attempt.platform.put = append
    attempt.write(last="x")
    for _ in range(5):
        attempt.upload()
    assert capsys.readouterr().err.count("last in $DDP_CHECKPOINT_DIR changes all the time") == 1
    assert not attempt.store.path.exists()


def test_a_failure_is_told_once(attempt, capsys):
    put = attempt.platform.put
    attempt.platform.put = refusing(put, lambda path, _: True)
    attempt.write(ckpt="first")
    for _ in range(4):
        attempt.time += QUIET_SECONDS
        attempt.mirror._upload(is_last=False)
    assert capsys.readouterr().err.count("checkpoints of the script were not uploaded") == 1


def test_a_checkpoint_that_grows_by_a_file_during_its_upload_is_not_taken(attempt):
    put = attempt.platform.put

    def write_too(path, url):
        put(path, url)
        if Path(path).name == "model":
            attempt.write(step1__optimizer="half of")

    attempt.platform.put = write_too
    attempt.write(step1__model="m1", other="x")
    attempt.upload()
    assert stored(attempt) == {"other": "x"}
    attempt.platform.put = put
    attempt.write(step1__optimizer="whole")
    attempt.upload()
    assert stored(attempt) == {"other": "x", "step1/model": "m1", "step1/optimizer": "whole"}


def test_the_last_checkpoint_stays_whatever_other_entries_do(attempt):
    attempt.write(step1__model="m1", log="x")
    attempt.upload()
    (attempt.folder / "step1" / "model").unlink()
    attempt.upload()
    assert stored(attempt) == {"step1/model": "m1", "log": "x"}
    attempt.write(step2__model="half", log="xx")
    attempt.look()
    attempt.write(step2__model="half of it")
    attempt.look()
    assert stored(attempt) == {"step1/model": "m1", "log": "xx"}
    attempt.mirror.upload_quiet(math.inf)
    assert stored(attempt) == {"step2/model": "half of it", "log": "xx"}, "at the end it is what is there"


def test_times_of_change_come_back(attempt, tmp_path):
    attempt.write(step2__model="m2", step1__model="m1")
    for seconds, name in enumerate(("step2", "step1")):
        for path in (attempt.folder / name / "model", attempt.folder / name):
            os.utime(path, (1000 + seconds, 1000 + seconds))
    attempt.upload()
    second = Attempt(tmp_path, 1)
    by_time = sorted(second.folder.iterdir(), key=os.path.getmtime)
    assert [path.name for path in by_time] == ["step2", "step1"]
    assert os.path.getmtime(by_time[1] / "model") == 1001


def test_what_was_written_until_rank_0_had_saved_and_left_is_complete(attempt):
    attempt.write(ckpt="saved")
    saved = os.stat(attempt.folder / "ckpt").st_mtime_ns
    attempt.write(other="half of")
    os.utime(attempt.folder / "other", ns=(saved + 1, saved + 1))
    attempt.mirror.upload_quiet(saved)
    assert attempt.found() == {"ckpt": "saved"}


def test_an_object_that_another_attempt_has_replaced_is_refused(attempt, tmp_path):
    attempt.write(ckpt="first")
    attempt.upload()
    Path(named(attempt)["ckpt"]).write_text("another one")
    with pytest.raises(InputError, match="was removed or replaced: start anew"):
        Attempt(tmp_path, 1)


def test_a_local_run_whose_restore_was_interrupted_restores_again(attempt, tmp_path):
    for name in ("step1", "step2"):
        attempt.write(**{f"{name}__model": name})
        attempt.upload()
    (tmp_path / "local" / "script").mkdir(parents=True)
    mirror = CheckpointMirror(attempt.platform, tmp_path / "local" / "script", attempt.store.path, None)
    last = Path(named(attempt)["step2/model"])
    last.rename(tmp_path / "away")
    with pytest.raises(InputError, match="was removed"):
        mirror.restore()
    (tmp_path / "away").rename(last)
    mirror.restore()
    assert files_in(tmp_path / "local") == {"script/step1/model": "step1", "script/step2/model": "step2"}


def test_an_entry_that_is_never_quiet_is_named_once(attempt, capsys):
    for number in range(200):
        attempt.write(run1__log="x" * number, run1__ckpt="whole")
        attempt.look()
    assert capsys.readouterr().err.count("run1 in $DDP_CHECKPOINT_DIR changes all the time") == 1
