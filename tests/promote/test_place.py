"""A place of promoted models: what it says of itself, whoever is killed in it and whoever else is there."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider

from flyte_ddp.attempt.platform_storage import files_at
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.flyte1 import platform
from flyte_ddp.promote.place import PROMOTED, ROLLED_BACK, Place, local_root, version_name
from flyte_ddp.promote.promotion import roll_back
from tests.object_storage import object_storage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["folder", "storage"])
def place(request, tmp_path):
    """A folder, and an object storage, fsspec's own in memory."""
    root = str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}"
    return Place(platform, f"{root}/place[1]")


def write(place: Place, path: str, content: bytes) -> None:
    files, root = files_at(platform, place.root)
    files.pipe_file(f"{root}/{path}", content)


def remove(place: Place, path: str) -> None:
    files, root = files_at(platform, place.root)
    files.rm_file(f"{root}/{path}")


def promote(place: Place, name: str, folder: Path) -> None:
    model = folder / "model"
    model.write_bytes(name.encode())
    seen = place.read()
    place.add(name, model, {"sha256": digest_of(name)})
    assert place.point(seen, name, PROMOTED)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_history_is_kept_and_an_earlier_version_comes_back(place, tmp_path):
    assert place.read().version == ""
    for name in ("first", "second"):
        promote(place, name, tmp_path)
    assert place.read().version == "second"
    assert place.roll_back("first").version == "first"
    assert [(event.name, event.how) for event in place.read().history] == [
        ("first", PROMOTED),
        ("second", PROMOTED),
        ("first", ROLLED_BACK),
    ]
    assert place.fetch("first", tmp_path / "fetched")["name"] == "first"
    assert (tmp_path / "fetched").read_text() == "first"
    with pytest.raises(InputError, match="name must be one of first, second, got 'third'"):
        place.roll_back("third")


def test_a_storage_that_flyte_reads_by_an_implementation_of_its_own(tmp_path, monkeypatch):
    """Once imported, it has registered one for s3 whose options have other names."""
    importlib.import_module("flyte.storage")
    assert fsspec.get_filesystem_class("s3").__module__.startswith("obstore")
    context = FlyteContextManager.current_context()
    with object_storage() as storage:
        for name, value in storage.environment.items():
            monkeypatch.setenv(name, value)
        files = FileAccessProvider(str(tmp_path), str(tmp_path), DataConfig.auto())
        with FlyteContextManager.with_context(context.with_file_access(files)):
            place = Place(platform, "s3://bucket/models")
            promote(place, "first", tmp_path)
            assert place.read().version == "first"
            assert place.fetch("first", tmp_path / "fetched")["name"] == "first"
        assert storage.objects["bucket/models/versions/first/model.pt"] == b"first"


OUTSIDE = {"format": 1, "version": "../../secret", "history": [{"name": "../../secret", "time": "", "how": PROMOTED}]}


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", NESTED, b'{"format": 1, "version": "x"}', json.dumps(OUTSIDE).encode()],
)
def test_a_damaged_pointer_is_one_error_that_a_roll_back_mends(place, tmp_path, content):
    promote(place, "first", tmp_path)
    write(place, "current.json", content)
    with pytest.raises(ReportedError, match=r"current.json is damaged .* roll back to a version: first"):
        place.read()
    place.roll_back("first")
    assert place.read().version == "first"


def test_a_roll_back_leaves_what_a_newer_program_has_written(place, tmp_path):
    promote(place, "first", tmp_path)
    newer = b'{"format": 2, "current": {"name": "second"}, "past": []}'
    write(place, "current.json", newer)
    for change in (place.read, lambda: place.roll_back("first"), lambda: roll_back(place, "first")):
        with pytest.raises(InputError, match=r"current.json must be of a format .* format 2 is newer .* use the newer"):
            change()
    assert place._files.cat_file(f"{place.root}/current.json") == newer


def test_a_lost_pointer_is_not_taken_for_an_empty_place(place, tmp_path):
    promote(place, "first", tmp_path)
    remove(place, "current.json")
    with pytest.raises(ReportedError, match=r"current.json is missing: put it back, or roll back to a version: first"):
        place.read()


def test_a_version_that_is_not_whole_is_refused(place, tmp_path):
    for name in ("first", "second"):
        promote(place, name, tmp_path)
    write(place, "versions/second/model.pt", b"other")
    with pytest.raises(ReportedError, match=r"second .* has a different model.pt .* roll back to another: first"):
        place.fetch("second", tmp_path / "fetched")
    remove(place, "versions/second/model.pt")
    with pytest.raises(ReportedError, match=r"second .* has no model.pt"):
        place.roll_back("second")
    for content in (b"{}", NESTED):
        write(place, "versions/second/version.json", content)
        with pytest.raises(ReportedError, match=r"second .* has an unreadable version.json"):
            place.facts("second")


def test_a_full_disk_of_this_machine_is_not_taken_for_a_fault_of_the_place(place, tmp_path):
    promote(place, "first", tmp_path)
    with pytest.raises(InputError, match=r"^cannot write to /dev: No space left on device; .* DDP_RUNS_DIR or TMPDIR"):
        place.fetch("first", Path("/dev/full"))


def test_a_change_that_was_not_seen_is_not_overwritten(place, tmp_path):
    promote(place, "first", tmp_path)
    seen = place.read()
    promote(place, "second", tmp_path)
    assert not place.point(seen, "first", PROMOTED)
    assert place.read().version == "second"


def test_what_is_no_place_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"absolute path or a URL of Flyte's storage .*got 'models'"):
        Place(platform, "models")
    with pytest.raises(InputError, match=r"a URL such as s3://bucket/mnist, got 's3:/bucket': add a slash"):
        local_root("s3:/bucket")
    with pytest.raises(InputError, match="no home folder for ~nobody-of-this-name/models: set place to an absol"):
        local_root("~nobody-of-this-name/models")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"must be writable: .*Not a directory"):
        promote(Place(platform, str(tmp_path / "file")), "first", tmp_path)
    with pytest.raises(InputError, match="must have a version to roll back to, but has none"):
        Place(platform, str(tmp_path / "none")).roll_back("first")


def test_versions_are_named_by_time_and_content():
    assert version_name("abcdef0123456789").endswith("-abcdef01")


def run(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_kill_before_any_operation_leaves_the_old_state_or_the_new_one(tmp_path):
    """Each process is killed by the kernel just before its n-th operation on a file of the place."""
    program = """if True:
        import hashlib, json, os, shutil, signal, sys
        from pathlib import Path
        from flyte_ddp.promote.place import PROMOTED, Place
        from flyte_ddp.flyte1 import platform

        root, model = Path(sys.argv[1], "place"), Path(sys.argv[1], "model")
        operations = ("open", "os.mkdir", "os.rename", "os.remove", "fcntl.flock")

        def promote(name, kill_at=0):
            count = 0
            def watch(event, arguments):
                nonlocal count
                if event in operations and (event == "fcntl.flock" or str(root) in str(arguments[0])):
                    count += 1
                    if count == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(watch)
            place = Place(platform, str(root))
            model.write_text(name)
            seen = place.read()
            place.add(name, model, {"sha256": hashlib.sha256(name.encode()).hexdigest()})
            assert place.point(seen, name, PROMOTED)

        def state():
            place = Place(platform, str(root))
            version = place.read().version
            if version:
                place.fetch(version, Path(sys.argv[1], "fetched"))
            return version

        seen = {"": set(), "old": set()}
        for before in seen:
            kill_at, ended = 0, False
            while not ended:
                shutil.rmtree(root, ignore_errors=True)
                if before and not os.fork():
                    promote(before)
                    os._exit(0)
                if before:
                    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
                kill_at += 1
                if not os.fork():
                    promote("new", kill_at)
                    os._exit(0)
                status = os.waitstatus_to_exitcode(os.wait()[1])
                assert status in (0, -signal.SIGKILL), status
                ended = status == 0
                after = state()
                seen[before].add(after)
                assert after in (before, "new")
                if not os.fork():  # the next one finds nothing in its way
                    promote("next")
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
                assert state() == "next"
            assert kill_at > 12, kill_at
        print(json.dumps({before: sorted(after) for before, after in seen.items()}))
    """
    assert json.loads(run(program, str(tmp_path))) == {"": ["", "new"], "old": ["new", "old"]}


def test_of_many_promoters_of_a_folder_none_is_lost(tmp_path):
    program = """if True:
        import hashlib, os, sys
        from pathlib import Path
        from flyte_ddp.promote.place import PROMOTED, Place
        from flyte_ddp.flyte1 import platform

        for number in range(4):
            if os.fork():
                continue
            place, model = Place(platform, sys.argv[1] + "/place"), Path(sys.argv[1], str(number))
            model.touch()
            for turn in range(10):
                name = f"{number}-{turn}"
                while True:
                    seen = place.read()
                    place.add(name, model, {"sha256": ""})
                    if place.point(seen, name, PROMOTED):
                        break
            os._exit(0)
        for number in range(4):
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    """
    run(program, str(tmp_path))
    history = [event.name for event in Place(platform, str(tmp_path / "place")).read().history]
    assert sorted(history) == sorted(f"{number}-{turn}" for number in range(4) for turn in range(10))
    assert len(os.listdir(tmp_path / "place" / "versions")) == 40
