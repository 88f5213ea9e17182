"""Blocks from storage: what is written can be read, and whatever is wrong with it is named."""

import io
import itertools
import json
import tarfile
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flyte_ddp.data import stored
from flyte_ddp.data.block_folder import BlockFolder, write_blocks
from flyte_ddp.data.blocks import Blocks, open_rows, rows_of, tree_of
from flyte_ddp.data.tar import TarImages, index_tars
from flyte_ddp.errors import DataError, DownloadError, InputError
from tests.object_storage import object_storage

TREE: dict[str, Any] = {
    "image": np.arange(7 * 6, dtype=np.uint8).reshape(7, 2, 3),
    "pair": (np.arange(7), [np.arange(7) % 2 == 0, np.linspace(0, 1, 7, dtype=np.float32)]),
}


@pytest.fixture
def storage(monkeypatch):
    with object_storage() as server:
        monkeypatch.setattr(stored, "PAUSE_SECONDS", 0)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        options = {
            "key": "key",
            "secret": "word",
            "client_kwargs": {"endpoint_url": server.environment["FLYTE_AWS_ENDPOINT"]},
        }
        monkeypatch.setattr("fsspec.config.conf", {})
        stored.use_storage_options({"s3": {**options, "skip_instance_cache": True}})
        yield server


def read(blocks, number, folder):
    path = folder / f"{number}.npy"
    blocks.fetch(number, path)
    return tree_of(open_rows(path, int(blocks.lengths[number]), blocks.name(number)))


def assert_same(tree, other):
    if isinstance(tree, dict):
        assert tree.keys() == other.keys()
        tree, other = list(tree.values()), list(other.values())
    if isinstance(tree, (tuple, list)):
        for one, two in zip(tree, other, strict=True):
            assert_same(one, two)
    else:
        assert np.array_equal(tree, other)
        assert tree.dtype == other.dtype


def cut(tree, start, stop):
    if isinstance(tree, dict):
        return {key: cut(part, start, stop) for key, part in tree.items()}
    return [cut(part, start, stop) for part in tree] if isinstance(tree, (tuple, list)) else tree[start:stop]


@pytest.mark.parametrize("tree", [TREE, TREE["image"], (TREE["image"], TREE["pair"][0])])
def test_rows_are_a_tree_again(tree):
    assert_same(tree_of(rows_of(tree, "it")), tree)


@pytest.mark.parametrize("pieces", [[0, 7], [0, 1, 2, 6, 7], [0, 5, 5, 7]])
def test_what_is_written_is_read(tmp_path, pieces):
    data = (cut(TREE, start, stop) for start, stop in itertools.pairwise(pieces))
    write_blocks(tmp_path / "blocks", data, 3)
    write_blocks(tmp_path / "whole", TREE, 3)
    for folder in ("blocks", "whole"):
        blocks = BlockFolder(tmp_path / folder)
        assert blocks.lengths.tolist() == [3, 3, 1]
        for number in range(3):
            (tmp_path / f"{number}.npy").unlink(missing_ok=True)
            assert_same(read(blocks, number, tmp_path), cut(TREE, 3 * number, 3 * number + 3))


@pytest.mark.filterwarnings("ignore:Stored array in format 2.0")
def test_a_block_may_have_thousands_of_arrays(tmp_path):
    tree = {f"feature_{number}": np.arange(7) + number for number in range(3000)}
    write_blocks(tmp_path / "blocks", tree, 4)
    assert_same(read(BlockFolder(tmp_path / "blocks"), 1, tmp_path), cut(tree, 4, 7))


def test_object_storage(tmp_path, storage):
    write_blocks("s3://bucket/blocks", TREE, 4)
    assert_same(read(BlockFolder("s3://bucket/blocks"), 1, tmp_path), cut(TREE, 4, 7))
    with pytest.raises(InputError, match="s3://bucket/blocks has blocks already: name another folder"):
        write_blocks("s3://bucket/blocks", TREE, 4)


@pytest.mark.parametrize(
    ("data", "rows", "words"),
    [
        (iter(()), 3, "there must be a sample"),
        (TREE, 0, "rows must be a whole number of at least 1, got 0"),
        (iter([TREE]), 2.5, "rows must be a whole number of at least 1, got 2.5"),
        (iter([TREE, {**TREE, "image": TREE["image"].astype(float)}]), 3, "all trees must have the same types"),
        ({"0": np.zeros(3), "1": np.zeros(3)}, 3, r"keys of a dict must be .* got \['0', '1'\]"),
        ({"a": {5: np.zeros(3)}}, 3, r"a: the keys of a dict must be strings, .* got \[5\]"),
        ({"a": np.array(["x"])}, 3, r"a: samples must be arrays of numbers \(n, ...\), got <U1 \(1,\)"),
        ({"a": [np.zeros(3), np.zeros(2)]}, 3, r"as many rows, got \[2, 3\]"),
        ({"a": np.zeros(())}, 3, "arrays of numbers"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, data, rows, words):
    with pytest.raises((InputError, DataError), match=words):
        write_blocks(tmp_path / "blocks", data, rows)
    assert not (tmp_path / "blocks" / "index.json").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "blocks").write_text("a file")
    with pytest.raises(InputError, match=rf"cannot write to {tmp_path}/blocks: File exists; .* set folder to another"):
        write_blocks(tmp_path / "blocks", TREE, 3)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def change(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (truncate, DownloadError, r"block-000001.npy .*tried 4 times: \d+ bytes .* write it again if it stays so"),
        (change, DataError, r"block-000001.npy has changed since it was written \(SHA-256 differs\): write it again"),
        (lambda path: path.unlink(), DataError, "block-000001.npy is not there: put it back"),
    ],
)
def test_a_damaged_block_is_named(tmp_path, monkeypatch, damage, error, words):
    monkeypatch.setattr(stored, "PAUSE_SECONDS", 0)
    write_blocks(tmp_path / "blocks", TREE, 4)
    damage(tmp_path / "blocks" / "block-000001.npy")
    with pytest.raises(error, match=words):
        read(BlockFolder(tmp_path / "blocks"), 1, tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"format": 1, "blocks": [{"name": 3}]}', '{"format": 1, "blocks": []}', '{"format": 9}'],
)
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(DataError, match=r"index.json (is damaged|is of format 9|has no blocks)"):
        BlockFolder(tmp_path)
    with pytest.raises(DataError, match=r"nowhere/index.json is not there"):
        BlockFolder(tmp_path / "nowhere")


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1], [[1]]])
def test_each_block_has_a_sample(lengths):
    with pytest.raises(InputError, match="each block must have a sample"):
        Blocks(lengths, lambda number: None)


# --- storage that fails ---


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
    monkeypatch.setattr(stored, "PIECE_SECONDS", 0.2)
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
    monkeypatch.setattr(stored, "PIECE_SECONDS", 0.2)
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


# --- tar files ---


def write_tar(path, samples, size=(8, 6)):
    with tarfile.open(path, "w") as file:
        for key, label in samples:
            buffer = io.BytesIO()
            Image.new("RGB", size, (label, 0, 0)).save(buffer, "PNG")
            for extension, content in (("png", buffer.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"some/{key}.{extension}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def test_tar_files(tmp_path):
    write_tar(tmp_path / "a.tar", [("000", 10), ("001", 20)])
    write_tar(tmp_path / "b.tar", [("002", 30)])
    with pytest.raises(DataError, match=r"index.json is not there"):
        TarImages(tmp_path, (3, 4, 4))
    index_tars(tmp_path)
    blocks = TarImages(tmp_path, (3, 4, 4))
    assert blocks.lengths.tolist() == [2, 1]
    images, labels = read(blocks, 0, tmp_path)
    assert images.shape == (2, 3, 4, 4)
    assert images[:, 0, 0, 0].tolist() == labels.tolist() == [10, 20]


def test_a_tar_file_that_is_wrong_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", [("000", 10), ("001", 20)])
    index_tars(tmp_path)
    blocks = TarImages(tmp_path, (3, 4, 4), labels="json")
    with pytest.raises(DataError, match=r"a.tar: some/000 must have .json and one of jpg, .*, got \['png', 'cls'\]"):
        read(blocks, 0, tmp_path)
    change(tmp_path / "a.tar")
    with pytest.raises(DataError, match=r"a.tar has changed since it was written"):
        read(TarImages(tmp_path, (3, 8, 8)), 0, tmp_path / "..")
    (tmp_path / "c.tar").write_bytes(b"no tar" * 1000)
    for name in ("a.tar", "index.json"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"c.tar is no tar file, or cut short"):
        index_tars(tmp_path)


def appended(kind, *names):
    """Adds members of 4 bytes, or links, to a tar file."""

    def damage(path):
        with tarfile.open(path, "a") as file:
            for name in names:
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, "some/000.png"
                member.size = 4 if kind == tarfile.REGTYPE else 0
                file.addfile(member, io.BytesIO(b"1234"))

    return damage


def damage_second_header(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"some/001.png")] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (appended(tarfile.LNKTYPE, "some/002.png", "some/002.cls"), r"some/002.png is a link: .* --hard-dereference"),
        (appended(tarfile.SYMTYPE, "some/002.png", "some/002.cls"), r"some/002.png is a link: .* --dereference"),
        (
            appended(tarfile.REGTYPE, "some/001.png", "some/001.cls"),
            r"some/001 has .png more than once: .*another name",
        ),
        (damage_second_header, r"more follows .* damaged, or several in one: write it again"),
        (lambda path: path.write_bytes(2 * path.read_bytes()), r"more follows .* damaged, or several in one"),
        (lambda path: path.write_bytes(path.read_bytes().partition(b"some/001.png")[0] + b"some/0"), r"or cut short"),
    ],
)
def test_a_tar_file_that_would_lose_samples_is_refused(tmp_path, damage, words):
    write_tar(tmp_path / "a.tar", [("000", 10), ("001", 20)])
    damage(tmp_path / "a.tar")
    with pytest.raises(DataError, match=rf"a.tar.*{words}"):
        index_tars(tmp_path)


def test_an_index_that_does_not_fit_its_tar_file_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", [("000", 10), ("001", 20)])
    index_tars(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["blocks"][0]["rows"] = 3
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"a.tar has 2 samples, where 3 were announced: call index_tars again"):
        read(TarImages(tmp_path, (3, 4, 4)), 0, tmp_path)


def test_what_stays_in_a_storage_is_known_by_its_index_or_by_its_files(tmp_path):
    write_blocks(tmp_path / "blocks", TREE, 4)
    before = stored.stored_data(str(tmp_path)).digest
    (tmp_path / "blocks" / "other").write_text("not in the index")
    assert stored.stored_data(str(tmp_path)).digest == before
    (tmp_path / "a.parquet").write_text("a")
    digests = {before, stored.stored_data(f"file://{tmp_path}").digest}
    (tmp_path / "a.parquet").write_text("ab")
    digests.add(stored.stored_data(str(tmp_path)).digest)
    assert len(digests) == 3
    (tmp_path / "empty").mkdir()
    for nowhere in ("empty", "nowhere"):
        with pytest.raises((InputError, DataError), match=r"data must be a folder with files|is not there"):
            stored.stored_data(f"file://{tmp_path / nowhere}")
