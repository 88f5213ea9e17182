"""A script's checkpoints in the storage: whole ones, whatever happens meanwhile."""

from pathlib import Path

import pytest

from flyte_ddp.attempt.checkpoints import PlatformStore, point_to
from flyte_ddp.errors import InputError
from flyte_ddp.manifest import read_manifest, write_manifest
from flyte_ddp.script.mirror import QUIET_SECONDS, CheckpointMirror
from tests.attempt.test_platform_training import Folders


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


def test_a_manifest_that_does_not_arrive_leaves_the_one_before(attempt, monkeypatch):
    attempt.write(ckpt="first")
    attempt.look()
    attempt.look()
    put = attempt.platform.put

    def refuse(path, url):
        if url.endswith("/checkpoint"):
            raise OSError("the storage is away")
        put(path, url)

    attempt.platform.put = refuse
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
    attempt.mirror.upload_quiet(take_all=True)
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
    write_manifest(place, {**(read_manifest(place) or {}), "objects": {"../outside": named(attempt)["ckpt"]}})
    with pytest.raises(InputError, match="got one of another training"):
        Attempt(tmp_path, 1)
    assert not (tmp_path / "pod-1" / "outside").exists()
