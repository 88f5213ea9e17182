"""Blocks: what is written can be read, and whatever is wrong with it is named."""

import itertools
from typing import Any

import numpy as np
import pytest

from flyte_ddp.data import remote_files
from flyte_ddp.data.blocks.block_folder import BlockFolder, write_blocks
from flyte_ddp.data.blocks.blocks import Blocks, open_rows, to_rows, to_tree
from flyte_ddp.errors import DataError, DownloadError, InputError

TREE: dict[str, Any] = {
    "image": np.arange(7 * 6, dtype=np.uint8).reshape(7, 2, 3),
    "pair": (np.arange(7), [np.arange(7) % 2 == 0, np.linspace(0, 1, 7, dtype=np.float32)]),
}


def read(blocks, number, folder):
    path = folder / f"{number}.npy"
    blocks.fetch(number, path)
    return to_tree(open_rows(path, int(blocks.lengths[number]), blocks.name(number)))


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
    assert_same(to_tree(to_rows(tree, "it")), tree)


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


def test_a_tree_of_many_blocks_is_copied_once(tmp_path, monkeypatch):
    copied, concatenate = list[int](), np.concatenate

    def counted(arrays):
        copied.append(sum(map(len, arrays)))
        return concatenate(arrays)

    monkeypatch.setattr(np, "concatenate", counted)
    write_blocks(tmp_path / "blocks", iter([np.arange(10), np.arange(100), np.arange(5)]), 20)
    assert sum(copied) < 200
    assert BlockFolder(tmp_path / "blocks").lengths.tolist() == [20, 20, 20, 20, 20, 15]


def test_arrays_of_swapped_bytes_are_joined(tmp_path):
    """As in FITS and IDX files; numpy joins them as what the processor has."""
    data = np.arange(14, dtype=">i4").reshape(7, 2)
    for number, given in enumerate((data, iter([{"a": data[:5]}, {"a": data[5:]}]))):
        write_blocks(tmp_path / str(number), given, 3)
        tree = read(BlockFolder(tmp_path / str(number)), 1, tmp_path / str(number))
        assert_same(tree["a"] if number else tree, data[3:6].astype("=i4"))


@pytest.mark.filterwarnings("ignore:Stored array in format 2.0")
def test_a_block_may_have_thousands_of_arrays(tmp_path):
    tree = {f"feature_{number}": np.arange(7) + number for number in range(3000)}
    write_blocks(tmp_path / "blocks", tree, 4)
    assert_same(read(BlockFolder(tmp_path / "blocks"), 1, tmp_path), cut(tree, 4, 7))


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
    monkeypatch.setattr(remote_files, "PAUSE_SECONDS", 0)
    write_blocks(tmp_path / "blocks", TREE, 4)
    damage(tmp_path / "blocks" / "block-000001.npy")
    with pytest.raises(error, match=words):
        read(BlockFolder(tmp_path / "blocks"), 1, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "[" * 100_000,
        '{"format": 1, "blocks": [{"name": 3}]}',
        '{"format": 1, "blocks": []}',
        '{"format": 9}',
        *(
            f'{{"format": 1, "blocks": [{{"name": "a", "rows": {rows}, "bytes": 90, "sha256": ""}}]}}'
            for rows in (0, 91, 10**30)
        ),
    ],
)
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(DataError, match=r"index.json (is damaged|is of format 9|has no blocks)"):
        BlockFolder(tmp_path)
    with pytest.raises(DataError, match=r"nowhere/index.json is not there"):
        BlockFolder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../outside.npy", "a/../../outside.npy", "{}/outside.npy", ""])
def test_an_index_names_nothing_outside_its_folder(tmp_path, name):
    write_blocks(tmp_path / "blocks", TREE, 7)
    (tmp_path / "blocks" / "block-000000.npy").rename(tmp_path / "outside.npy")
    index = tmp_path / "blocks" / "index.json"
    index.write_text(index.read_text().replace("block-000000.npy", name.format(tmp_path)))
    with pytest.raises(DataError, match=r"index.json names .*, which is not in its folder: write the folder again"):
        BlockFolder(tmp_path / "blocks")


def test_an_index_is_written_whole_or_not_at_all(tmp_path):
    """It follows no link out of the folder, and a full disk leaves the old one."""
    kept = tmp_path / "kept"
    kept.write_text("of another")
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "index.json").symlink_to(kept)
    kept.unlink()
    write_blocks(tmp_path / "blocks", TREE, 7)
    assert not kept.exists()
    assert BlockFolder(tmp_path / "blocks").lengths.tolist() == [7]
    assert sorted(file.name for file in (tmp_path / "blocks").iterdir()) == ["block-000000.npy", "index.json"]


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1], [[1]]])
def test_each_block_has_a_sample(lengths):
    with pytest.raises(InputError, match="each block must have a sample"):
        Blocks(lengths, lambda number: None)
