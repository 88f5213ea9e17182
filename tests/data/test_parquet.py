"""Parquet files as blocks."""

from typing import Any

import numpy as np
import pytest

from flyte_ddp.data import remote_files
from flyte_ddp.data.blocks.blocks import open_rows, to_tree
from flyte_ddp.errors import DataError, InputError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from flyte_ddp.data.blocks.parquet import Parquet  # noqa: E402

COLUMNS: dict[str, Any] = {
    "x": np.arange(10, dtype=np.float32),
    "label": np.arange(10, dtype=np.int16),
    "vector": [[i, i + 0.5] for i in range(10)],
    "matrix": [[[i, i], [i, i], [i, 1]] for i in range(10)],
}


def write(path, start=0, stop=10, rows=4, **columns):
    table = pa.table({name: values[start:stop] for name, values in {**COLUMNS, **columns}.items()})
    parquet.write_table(table, path, row_group_size=rows)


def read(blocks, number, folder):
    path = folder / f"read-{number}"
    blocks.fetch(number, path)
    return to_tree(open_rows(path, int(blocks.lengths[number]), "it"))


def test_row_groups_are_blocks(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "00000", 0, 6)
    write(folder / "00001", 6, 10)
    write(folder / "00002", 0, 0)  # as Spark leaves them
    (folder / "_SUCCESS").touch()
    blocks = Parquet(folder, ["vector", "label", "matrix"])
    assert blocks.lengths.tolist() == [4, 2, 4]
    found = read(blocks, 2, tmp_path)
    assert list(found) == ["vector", "label", "matrix"]
    assert found["label"].tolist() == [6, 7, 8, 9]
    assert found["label"].dtype == np.int16
    assert found["vector"].tolist() == COLUMNS["vector"][6:]
    assert found["matrix"].shape == (4, 3, 2)
    assert found["matrix"].tolist() == COLUMNS["matrix"][6:]
    assert Parquet(folder / "00000", ["x"]).lengths.tolist() == [4, 2]


def test_a_row_group_may_be_larger_than_a_request(tmp_path, monkeypatch):
    values = np.random.default_rng(0).random(1000)
    parquet.write_table(pa.table({"x": values, "y": -values}), tmp_path / "a")
    monkeypatch.setattr(remote_files, "PIECE_BYTES", 500)
    found = read(Parquet(tmp_path / "a", ["x", "y"]), 0, tmp_path)
    assert np.array_equal(found["x"], values)
    assert np.array_equal(found["y"], -values)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"x": [f"{i}" for i in range(10)]}, r"b has columns of \('string', 'int16'\), where others have"),
        ({"x": np.arange(10.0)}, r"b has columns of \('double', 'int16'\), where others have \('float', 'int16'\)"),
    ],
)
def test_columns_that_change_are_refused(tmp_path, other, words):
    write(tmp_path / "a")
    write(tmp_path / "b", **other)
    with pytest.raises(DataError, match=words):
        Parquet(tmp_path, ["x", "label"])


def test_what_is_missing_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no rows: it must be a folder"):
        Parquet(tmp_path, ["x"])
    write(tmp_path / "a")
    with pytest.raises(DataError, match=r"a has no column y, but x, label, vector, matrix"):
        Parquet(tmp_path, ["y"])
    for columns in ([], ["x", "x"]):
        with pytest.raises(InputError, match="columns must be names, each once"):
            Parquet(tmp_path, columns)
    with pytest.raises(DataError, match=r"nowhere (is not there|has no rows)"):
        Parquet(tmp_path / "nowhere", ["x"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([None, *range(9)], "column x has empty values: fill them in"),
        ([[1]] * 3 + [[1, 2]] * 7, "lists in column x must have one length"),
        ([[1, None]] * 10, "column x has empty values"),
        (["a"] * 10, "samples must be arrays of numbers"),
    ],
)
def test_values_that_are_no_samples_are_refused(tmp_path, values, words):
    write(tmp_path / "a", x=values)
    with pytest.raises(DataError, match=rf"a, row group 0:.*{words}"):
        read(Parquet(tmp_path, ["x"]), 0, tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    write(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    for content, words in (
        (b"", "a is empty"),
        (whole[:-9], "a is no Parquet file, or cut short"),
        (b"x" * 99, "a is no"),
    ):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(DataError, match=words):
            Parquet(tmp_path, ["x"])
    (tmp_path / "a").write_bytes(whole)
    blocks = Parquet(tmp_path, ["x"])
    (tmp_path / "a").write_bytes(b"y" * len(whole))
    with pytest.raises(DataError, match=r"a, row group 0 is damaged"):
        read(blocks, 0, tmp_path)
    (tmp_path / "a").unlink()
    with pytest.raises(DataError, match="a is not there"):
        read(blocks, 0, tmp_path)
