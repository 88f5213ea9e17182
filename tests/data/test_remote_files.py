"""Data that stay in a storage, which may fail: they are asked for again, and named."""

import pytest

from flyte_ddp.data import remote_files
from flyte_ddp.data.blocks.block_folder import BlockFolder, write_blocks
from flyte_ddp.errors import DataError, DownloadError, InputError
from tests.data.test_blocks import TREE, assert_same, cut, read
from tests.object_storage import object_storage


@pytest.fixture
def storage(monkeypatch):
    with object_storage() as server:
        monkeypatch.setattr(remote_files, "PAUSE_SECONDS", 0)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        options = {
            "key": "key",
            "secret": "word",
            "client_kwargs": {"endpoint_url": server.environment["FLYTE_AWS_ENDPOINT"]},
        }
        monkeypatch.setattr("fsspec.config.conf", {})
        remote_files.use_storage_options({"s3": {**options, "skip_instance_cache": True}})
        yield server


def test_object_storage(tmp_path, storage):
    write_blocks("s3://bucket/blocks", TREE, 4)
    assert_same(read(BlockFolder("s3://bucket/blocks"), 1, tmp_path), cut(TREE, 4, 7))
    with pytest.raises(InputError, match="s3://bucket/blocks has blocks already: name another folder"):
        write_blocks("s3://bucket/blocks", TREE, 4)


def test_what_is_no_file_is_not_listed_and_strange_names_are(storage):
    """Consoles write an empty object for each folder that one makes there."""
    names = ["photos/", "photos/cats/", "photos/cats/1.png", "photos//2.png", "photos/.hidden", "photos/a/.b/3.png"]
    for name in [*names, "photos-of-others/4.png", "photos/_SUCCESS"]:
        storage.objects[f"bucket/{name}"] = b"" if name.endswith("/") else b"png"
    photos = remote_files.Stored("s3://bucket/photos")
    assert list(photos.details()) == ["/2.png", "_SUCCESS", "cats/1.png"]
    assert photos.sizes() == {"/2.png": 3, "cats/1.png": 3}
    assert photos.read("/2.png") == b"png"
    assert list(remote_files.Stored("s3://bucket/photos/cats/1.png").details()) == [""]
    assert remote_files.Stored("s3://bucket/nothing").details() == {}


def test_a_link_that_leads_nowhere_is_named_and_not_left_out(tmp_path):
    """As data have them whose content was not fetched yet; editors lock a file by a hidden one."""
    (tmp_path / "cat.png").write_bytes(b"png")
    (tmp_path / ".#cat.png").symlink_to("somebody@host")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "annex").symlink_to("gone")
    folder = remote_files.Stored(tmp_path)
    assert folder.sizes() == {"cat.png": 3}
    (tmp_path / "dog.png").symlink_to("annex/dog.png")
    with pytest.raises(InputError, match=r"dog.png leads to annex/dog.png, which is not there: put it there"):
        folder.details()


def test_a_file_that_is_removed_meanwhile_keeps_no_other_from_being_listed(tmp_path, monkeypatch):
    def is_file(path):
        if path.name == "gone":
            path.unlink()
        return True

    for name in ("cat.png", "gone"):
        (tmp_path / name).touch()
    monkeypatch.setattr("pathlib.Path.is_file", is_file)
    assert remote_files.Stored(tmp_path).sizes() == {"cat.png": 0}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gopher://host/x", "must be a path, or the URL of a storage such as s3://, .*: gopher:// is none"),
        ("dropbox://x", "cannot be read here .*: .*install"),
    ],
)
def test_a_url_that_nothing_here_reads_is_refused(url, words):
    with pytest.raises(InputError, match=words):
        remote_files.stored_data(url)


def test_a_storage_that_fails_now_and_then_is_asked_again(tmp_path, storage):
    write_blocks("s3://bucket/blocks", TREE, 4)
    blocks = BlockFolder("s3://bucket/blocks")
    storage.failures = 3
    assert_same(read(blocks, 0, tmp_path), cut(TREE, 0, 4))
    assert not storage.failures


def test_a_storage_that_refuses_for_good_ends_with_the_name_of_the_object(tmp_path, storage):
    write_blocks("s3://bucket/blocks", TREE, 4)
    blocks = BlockFolder("s3://bucket/blocks")
    storage.failures = 10**6
    with pytest.raises(DownloadError, match=r"s3://bucket/blocks/block-000000.npy could not be read, tried 4 times"):
        read(blocks, 0, tmp_path)
    assert not list(tmp_path.glob("1*"))


def test_a_storage_that_hangs_ends_with_the_name_of_the_object(tmp_path, storage, monkeypatch):
    write_blocks("s3://bucket/blocks", TREE, 4)
    blocks = BlockFolder("s3://bucket/blocks")
    monkeypatch.setattr(remote_files, "PIECE_SECONDS", 0.2)
    storage.hanging.clear()
    try:
        with pytest.raises(
            DownloadError, match=r"s3://bucket/blocks/block-000000.npy could not be read, tried 4 times"
        ):
            read(blocks, 0, tmp_path)
    finally:
        storage.hanging.set()


def test_a_storage_that_trickles_is_asked_again_and_ends_with_the_name_of_the_object(tmp_path, storage, monkeypatch):
    write_blocks("s3://bucket/blocks", TREE, 4)
    blocks = BlockFolder("s3://bucket/blocks")
    monkeypatch.setattr(remote_files, "PIECE_SECONDS", 0.2)
    storage.drips = 2
    assert_same(read(blocks, 0, tmp_path), cut(TREE, 0, 4))
    assert not storage.drips
    storage.drips = 10**6
    with pytest.raises(DownloadError, match=r"s3://bucket/blocks/block-000001.npy could not be read, tried 4 times"):
        read(blocks, 1, tmp_path)


def test_what_may_not_be_read_is_named_at_once(tmp_path, storage):
    write_blocks("s3://bucket/blocks", TREE, 4)
    blocks = BlockFolder("s3://bucket/blocks")
    storage.failures, storage.failure = 1, (403, "AccessDenied")
    with pytest.raises(DataError, match=r"s3://bucket/blocks/block-000000.npy may not be read: .*: allow it"):
        read(blocks, 0, tmp_path)


def test_what_stays_in_a_storage_is_known_by_its_index_or_by_its_files(tmp_path):
    write_blocks(tmp_path / "blocks", TREE, 4)
    before = remote_files.stored_data(str(tmp_path)).digest
    (tmp_path / "blocks" / "other").write_text("not in the index")
    assert remote_files.stored_data(str(tmp_path)).digest == before
    (tmp_path / "a.parquet").write_text("a")
    digests = {before, remote_files.stored_data(f"file://{tmp_path}").digest}
    (tmp_path / "a.parquet").write_text("ab")
    digests.add(remote_files.stored_data(str(tmp_path)).digest)
    assert len(digests) == 3
    (tmp_path / "index.json").write_text('{"shards": []}')
    digests.add(remote_files.stored_data(str(tmp_path)).digest)
    (tmp_path / "a.parquet").write_text("abc")
    digests.add(remote_files.stored_data(str(tmp_path)).digest)
    assert len(digests) == 5, "another library's index leaves the files beside it to be looked at"
    (tmp_path / "empty").mkdir()
    for nowhere in ("empty", "nowhere"):
        with pytest.raises((InputError, DataError), match=r"data must be a folder with files|is not there"):
            remote_files.stored_data(f"file://{tmp_path / nowhere}")
