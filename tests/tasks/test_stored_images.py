"""Folders of image files, in storage that is not this machine's disk: fsspec's own, in memory."""

from pathlib import Path

from flytekit import FlyteContextManager
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.data.image_settings import ImageSettings
from flyte_ddp.tasks.image_folder import find_images
from flyte_ddp.tasks.stored_images import fetch, list_files


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


def test_the_key_of_a_folder_in_storage_follows_its_files():
    storage = FlyteContextManager.current_context().file_access.get_filesystem_for_path("memory://pets")
    storage.pipe("/pets/cat/1.png", b"a cat")
    found = [find_images.task_function("memory://pets", ImageSettings()) for _ in range(2)]
    storage.pipe("/pets/cat/1.png", b"a dog")
    found.append(find_images.task_function("memory://pets", ImageSettings()))
    assert {one.folder.remote_source for one in found} == {"memory://pets"}
    assert found[0].stamp == found[1].stamp != found[2].stamp
    assert not find_images.metadata.cache, "else nobody would look again"
