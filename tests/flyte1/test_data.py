"""The cache of a training goes by what the data are, not by where; also in storage that is not this machine's disk."""

import pkgutil
from pathlib import Path
from zipfile import ZipFile

import fsspec
import numpy as np
import pytest
from flytekit import Cache, FlyteContextManager, task, workflow
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.platform_storage import download_once
from flyte_ddp.attempt.platform_training import IMAGE_CLASSIFIER
from flyte_ddp.data.blocks.block_folder import write_blocks
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.errors import DownloadError, InputError
from flyte_ddp.flyte1.data import (
    downloaded_once,
    fetch,
    file_by_content,
    folder_by_content,
    list_files,
    new_folder,
    weights_by_content,
)
from flyte_ddp.flyte1.index_images import find_images
from flyte_ddp.flyte1.inputs import classifier_metadata
from flyte_ddp.model_files.model_metadata import ModelMetadata, add_metadata
from tests.commands import ROOT
from tests.object_storage import object_storage

trained: "list[str]" = []


@task(cache=Cache(version="1"))
def train_on_folder(data: FlyteDirectory) -> int:
    trained.append(str(data))
    return len(trained)


@task(cache=Cache(version="1"))
def train_on_file(data: FlyteFile) -> int:
    trained.append(str(data))
    return len(trained)


@task(cache=Cache(version="1"))
def train_from(init: FlyteFile | None = None) -> int:
    trained.append(str(init))
    return len(trained)


@workflow
def weights_wf(init: FlyteFile) -> int:
    return train_from(init=weights_by_content(file=init))


@workflow
def folder_wf(folder: FlyteDirectory) -> int:
    return train_on_folder(data=folder_by_content(folder=folder))


@workflow
def file_wf(file: FlyteFile) -> int:
    return train_on_file(data=file_by_content(file=file))


def test_what_changed_is_trained_on_anew(tmp_path):
    file = tmp_path / "folder" / "a.txt"
    file.parent.mkdir()
    file.write_text("1")
    folder, path = FlyteDirectory(str(file.parent)), FlyteFile(str(file))
    first = folder_wf(folder=folder), file_wf(file=path)
    assert (folder_wf(folder=folder), file_wf(file=path)) == first
    file.write_text("12")
    second = folder_wf(folder=folder), file_wf(file=path)
    assert all(new > old for new, old in zip(second, first, strict=True))
    (file.parent / "b.txt").write_text("3")
    assert folder_wf(folder=folder) > second[0]
    assert file_wf(file=path) == second[1]


def test_weights_go_by_their_content_alone(tmp_path):
    first, copy = tmp_path / "model.pt", tmp_path / "copy.pt"
    first.write_text("1")
    copy.write_text("1")
    number = weights_wf(init=FlyteFile(str(first)))
    assert weights_wf(init=FlyteFile(str(copy))) == number
    first.write_text("2")
    assert weights_wf(init=FlyteFile(str(first))) > number


# --- in storage: fsspec's own, in memory ---


def test_folder_in_storage_is_listed_and_fetched_file_by_file(tmp_path):
    storage = FlyteContextManager.current_context().file_access.get_filesystem_for_path("memory://photos")
    for name in ("b.png", "a/2.jpg", "a/1.jpg", ".hidden", "a/.cache/3.jpg"):
        storage.pipe(f"/photos/{name}", name.encode())
    folder = FlyteDirectory("memory://photos")
    before = list_files(folder)
    assert list(before) == ["a/1.jpg", "a/2.jpg", "b.png"]

    fetched = dict(fetch(folder, ["a/2.jpg", "b.png"], tmp_path))
    assert {name: Path(path).read_text() for name, path in fetched.items()} == {"a/2.jpg": "a/2.jpg", "b.png": "b.png"}

    storage.pipe("/photos/b.png", b"another content")
    changed = {name for name, version in list_files(folder).items() if version != before[name]}
    assert changed == {"b.png"}


def test_a_storage_that_does_not_deliver_a_file_now_is_worth_a_retry(monkeypatch, tmp_path):
    monkeypatch.setattr("fsspec.config.conf", {})
    with object_storage() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.objects["bucket/photos/a.png"] = b""
        access = FileAccessProvider(tmp_path, "s3://bucket/raw")
        folder = FlyteDirectory("s3://bucket/photos")
        with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
            server.failures = 9
            with pytest.raises(DownloadError, match=r"^s3://bucket/photos cannot be downloaded: OSError: .*Refused"):
                fetch(folder, ["a.png"], tmp_path)
            server.failures = 0
            with pytest.raises(FileNotFoundError):
                fetch(folder, ["b.png"], tmp_path)


def test_the_key_of_a_folder_in_storage_follows_its_files():
    storage = FlyteContextManager.current_context().file_access.get_filesystem_for_path("memory://pets")
    storage.pipe("/pets/cat/1.png", b"a cat")
    found = [find_images.task_function("memory://pets", ImageSettings()) for _ in range(2)]
    storage.pipe("/pets/cat/1.png", b"a dog")
    found.append(find_images.task_function("memory://pets", ImageSettings()))
    assert {one.folder.remote_source for one in found} == {"memory://pets"}
    assert found[0].stamp == found[1].stamp != found[2].stamp
    assert not find_images.metadata.cache, "else nobody would look again"


def test_a_folder_without_files_is_refused_before_a_pod_downloads_it(tmp_path):
    for url in ("memory://mistyped", str(tmp_path)):
        with pytest.raises(
            InputError, match=rf"folder must have files, got {url} without any: correct its path or URL"
        ):
            folder_by_content(folder=FlyteDirectory(url))


def test_a_task_writes_blocks_into_flytes_storage(monkeypatch, tmp_path):
    """By Flyte's settings, and what flytekit itself then reads and writes is not disturbed."""
    monkeypatch.setattr("fsspec.config.conf", {})
    with object_storage() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        access = FileAccessProvider(tmp_path, "s3://bucket/raw")
        with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
            folder = new_folder()
            write_blocks(f"{folder.path}/train", {"number": np.arange(5)}, 2)
            assert folder.path.startswith("s3://bucket/")
            place = folder.path.removeprefix("s3://")
            names = ["block-000000.npy", "block-000001.npy", "block-000002.npy", "index.json"]
            assert sorted(server.objects) == [f"{place}/train/{name}" for name in names]
            assert new_folder().path != folder.path
            literal = TypeEngine.to_literal(
                FlyteContextManager.current_context(),
                folder,
                FlyteDirectory,
                TypeEngine.to_literal_type(FlyteDirectory),
            )
            assert literal.scalar.blob.uri == folder.path
            assert list(list_files(folder)) == [f"train/{name}" for name in names]


def test_a_file_given_as_a_folder_is_named_and_what_is_no_file_is_left_out(monkeypatch):
    storage = FlyteContextManager.current_context().file_access.get_filesystem_for_path("memory://strange")
    storage.pipe("/strange/one.png", b"a file")
    with pytest.raises(InputError, match=r"must be a folder, got the file memory://strange/one.png: give the folder"):
        list_files(FlyteDirectory("memory://strange/one.png"))
    monkeypatch.setattr("fsspec.config.conf", {})
    with object_storage() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        for key in ("pets/", "pets/cats/", "pets/cats/1.png", "pets//2.png"):
            server.objects[f"bucket/{key}"] = b""
        access = FileAccessProvider("/tmp", "s3://bucket/raw")
        with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
            assert list(list_files(FlyteDirectory("s3://bucket/pets"))) == ["/2.png", "cats/1.png"]


def test_a_download_that_fails_or_was_killed_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def download(path):
        Path(path).write_text("all of it")

    def fail(path):
        Path(path).write_text("half of it")
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        download_once("s3://bucket/x.bin", "x.bin", fail)
    (lock,) = tmp_path.iterdir()
    killed = lock.with_name(f".{lock.stem}.0123.partial")
    killed.mkdir()
    (killed / "x.bin").write_text("half of it")
    assert download_once("s3://bucket/x.bin", "x.bin", download).read_text() == "all of it"
    assert download_once("s3://bucket/x.bin", "x.bin", fail).read_text() == "all of it", "it is there"
    assert {file.name for file in tmp_path.iterdir()} == {lock.name, lock.stem}


def test_a_file_of_this_host_is_used_where_it_is(tmp_path):
    """A copy would keep what the file had when it was first used."""
    file = tmp_path / "x.bin"
    file.write_text("as it is now")
    for url in (str(file), f"file://{file}"):
        assert downloaded_once(FlyteFile(url)) == file


@pytest.mark.parametrize(
    ("example", "asked"),
    [("resnet", ["folder"]), ("finetune_text", ["folder"]), ("finetune_images", ["folder", "weights"])],
)
def test_the_examples_are_trained_anew_where_files_have_changed(example, asked, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    found = pkgutil.resolve_name(f"{example}.workflow:{example}_wf")
    names = [node.flyte_entity.name for node in found.nodes]
    assert names[: len(asked)] == [f"flyte_ddp.flyte1.data.{one}_by_content" for one in asked]


@task
def dataset_of(model_state: PythonPickledFile | None) -> str:
    known = classifier_metadata(model_state)
    return known.data["name"] if known else ""


def test_a_local_run_reads_weights_that_are_in_a_storage(tmp_path):
    with ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/version", "3")
    data = {"name": "digits", "digest": ""}
    add_metadata(tmp_path / "model.pt", ModelMetadata(IMAGE_CLASSIFIER.name, "", {}, data, {}, "accuracy", {}, {}, {}))
    fsspec.filesystem("memory").pipe_file("/weights/model.pt", (tmp_path / "model.pt").read_bytes())
    assert dataset_of(model_state=PythonPickledFile("memory://weights/model.pt")) == "digits"
