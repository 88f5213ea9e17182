"""Folders of blocks, which write_blocks writes and BlockFolder reads.

block-000000.npy, …: the blocks, as blocks.py describes them.
index.json: name, rows, bytes and SHA-256 of each block. It is written last.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from flyte_ddp.data.blocks.blocks import Blocks, check_count, count_rows, to_rows
from flyte_ddp.data.remote_files import INDEX, Stored
from flyte_ddp.errors import DataError, InputError

FORMAT = 1
ENTRY = {"name": str, "rows": int, "bytes": int, "sha256": str}


class Indexed(Blocks):
    """Files of samples in a folder with an index."""

    def __init__(self, url: str | Path):
        """Read the index.

        Args:
            url: the folder: s3://, gs://, abfs://, file:// or a path.

        Raises:
            DataError: there is no such index.
        """
        self.stored = Stored(url)
        self.files = read_index(self.stored)
        super().__init__([file["rows"] for file in self.files])

    def name(self, number: int) -> str:
        return self.stored.name(self.files[number]["name"])

    def pieces(self, number: int) -> Iterator[bytes]:
        """Yield the content of a block's file piece by piece, and check it at the end.

        Args:
            number: the number of the block, from 0.

        Raises:
            DataError: The file is missing or may not be read. Or, after the last piece: its SHA-256 is not that in the
                index.
            DownloadError: The storage fails, or the file is shorter than the index says.
        """
        file = self.files[number]
        digest = hashlib.sha256()
        yield from self.stored.pieces(file["name"], file["bytes"], digest)
        if digest.hexdigest() != file["sha256"]:
            raise DataError(f"{self.name(number)} has changed since it was written (SHA-256 differs)", "write it again")


class BlockFolder(Indexed):
    """The blocks that write_blocks wrote."""

    def fetch(self, number: int, path: Path) -> None:
        with open(path, "xb") as file:
            for piece in self.pieces(number):
                file.write(piece)


def write_blocks(folder: str | Path, data: Any, rows: int) -> None:
    """Write samples as block files, block-000000.npy and so on, and then their index, for BlockFolder to read.

    Args:
        folder: a path or URL; it may be missing. Block files in it are overwritten, but an index is refused. A pod's
            disk need not hold the blocks: write to a URL of the storage.
        data: a tree of arrays (N, ...), or an iterator of such trees, of any lengths but the same types. A tree is a
            single array, or arrays in dicts, lists and tuples.
        rows: samples of a block; the last block may be shorter. Blocks of 16 to 128 MiB are read at full speed, and an
            epoch mixes a few hundred blocks better than a few.

    Raises:
        InputError: rows is no positive whole number, the folder has an index already or cannot be written to, the trees
            differ in types or shapes, or there are no samples.
        DataError: a tree is no tree of arrays of numbers, or its arrays differ in length.
    """
    check_count("rows", rows)
    stored = Stored(folder)
    if stored.files.exists(f"{stored.root}/{INDEX}"):
        raise InputError(f"{folder} has blocks already: name another folder")
    written = []
    for number, block in enumerate(_in_blocks(data if isinstance(data, Iterator) else _slices(data, rows), rows)):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, block, allow_pickle=False)
        content = buffer.getvalue()
        name = f"block-{number:06}.npy"
        stored.write(name, content)
        written.append(entry(name, len(block), len(content), hashlib.sha256(content)))
    write_index(stored, written)


def entry(name: str, rows: int, size: int, digest: Any) -> dict[str, Any]:
    """Return the entry of a file in an index; digest is a hashlib.sha256 of its content."""
    return {"name": name, "rows": rows, "bytes": size, "sha256": digest.hexdigest()}


def write_index(stored: Stored, blocks: list[dict[str, Any]]) -> None:
    """Write the index of a folder. Raises InputError if there are no blocks."""
    if not blocks:
        raise InputError(f"there must be a sample, got none for {stored.url}")
    stored.write(INDEX, json.dumps({"format": FORMAT, "blocks": blocks}).encode())


def read_index(stored: Stored) -> list[dict[str, Any]]:
    """Return the entries of a folder's index, one for each block, in order.

    Each is a dict with "name", the file's name below the folder; "rows", the number of samples; "bytes", the file's
    size; and "sha256", in hex.

    Raises:
        DataError: there is no index, it may not be read, it is damaged or empty, or names a file outside of the folder.
        DownloadError: the storage fails.
    """
    where = stored.name(INDEX)
    try:
        content = json.loads(stored.read(INDEX))
        if content["format"] != FORMAT:
            raise DataError(f"{where} is of format {content['format']}, where this version reads {FORMAT}")
        blocks: list[dict[str, Any]] = content["blocks"]
        for block in blocks:
            if not all(type(block[key]) is kind for key, kind in ENTRY.items()):
                raise TypeError
            if not 0 < block["rows"] <= block["bytes"]:  # numpy's error for this would not name the index
                raise ValueError
        if not blocks:
            raise DataError(f"{where} has no blocks", "write the folder again")
        for path in (PurePosixPath(block["name"]) for block in blocks):
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise DataError(f"{where} names {path}, which is not in its folder", "write the folder again")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{where} is damaged", "write the folder again") from None
    return blocks


def _slices(tree: Any, rows: int) -> Iterator[Any]:
    return (_cut(tree, slice(start, start + rows)) for start in range(0, count_rows(tree, "data"), rows))


def _cut(tree: Any, rows: slice) -> Any:
    if isinstance(tree, dict):
        return {key: _cut(part, rows) for key, part in tree.items()}
    return tuple(_cut(part, rows) for part in tree) if isinstance(tree, (tuple, list)) else tree[rows]


def _in_blocks(trees: Iterable[Any], rows: int) -> Iterator[np.ndarray]:
    """Yield the samples of many trees of arrays (n, ...) as blocks, which are arrays of `rows` samples.

    The samples keep their order, and each is a row as to_rows() packs it. A block may have samples of several trees.
    The last block may be shorter. Without any sample, nothing is yielded.

    Raises:
        InputError: The trees differ in types or shapes.
        DataError: A tree has anything but arrays of numbers, or its arrays differ in length.
    """
    waiting: list[np.ndarray] = []
    count = 0
    for number, tree in enumerate(trees):
        found = to_rows(tree, f"tree {number}")
        waiting.append(found.astype(found.dtype.newbyteorder("="), copy=False))  # numpy joins arrays of native order
        if waiting[0].dtype != waiting[-1].dtype or waiting[0].shape[1:] != waiting[-1].shape[1:]:
            raise InputError(
                f"all trees must have the same types and shapes, got {waiting[-1].dtype} after {waiting[0].dtype}"
            )
        if (count := count + len(found)) >= rows:
            joined = np.concatenate(waiting)
            whole = count - count % rows
            yield from (joined[start : start + rows] for start in range(0, whole, rows))
            waiting = [joined[whole:]]
            count = count - whole
    if count:
        yield np.concatenate(waiting)
