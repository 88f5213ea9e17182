"""Samples in blocks, for data larger than a machine's disk. Only the blocks at hand are on this machine.

A block is one array of rows, a row being a sample. The array is a plain one, or a structured one (numpy.dtype) that
nests as the samples do. So a random sample is one read, and numpy alone can read and write a block, as an .npy file.
"""

import traceback
from collections.abc import Callable, Sequence
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.errors import DataError, InputError, ReportedError

MOST_HEADER_BYTES = 2**24  # the limit of an .npy file's header; the names of 400 arrays reach numpy's own limit


class Blocks:
    """Samples that are read block by block, each once per epoch and node. Recipe.data may return such data.

    Attributes:
        lengths: (blocks,) int64, the samples of each block, at least 1.
        window: how many samples of a stream are shuffled among one another. A node holds the blocks of a window of each
            of its streams, so a larger window mixes better and needs a larger cache.
        streams: how many places of the data an epoch reads from in turn, at most batch_size of them. The ranks divide
            the streams among themselves, so there should be several for each rank.
        threads: how many blocks a rank fetches at a time, each in a thread of its own.
    """

    window = 8192
    streams = 32
    threads = 4

    def __init__(self, lengths: Sequence[int] | np.ndarray, read: Callable[[int], Any] | None = None):
        """Describe the blocks.

        Args:
            lengths: the samples of each block.
            read: read(number) returns the samples of a block, from 0, as a tree of arrays (lengths[number], ...): a
                single array, or arrays in dicts and tuples. It must return the same samples each time. Without read, a
                subclass defines fetch.
        """
        self.lengths = np.array(lengths, np.int64)
        if self.lengths.ndim != 1 or not len(self.lengths) or self.lengths.min() < 1:
            raise InputError(f"each block must have a sample, and there must be a block, got lengths {lengths}")
        self._read = read

    def name(self, number: int) -> str:
        """Return a block's name for messages."""
        return f"block {number}"

    def fetch(self, number: int, path: Path) -> None:
        """Write a block to a new .npy file.

        By default, the function `read` given to Blocks returns the block as a tree of arrays, and to_rows() packs that
        into the rows to write, one for each sample. A subclass without `read` overrides this method, and must write
        lengths[number] rows. A rank calls this method in several threads at a time.

        Args:
            number: the number of the block, from 0.
            path: the path of the file, which must not exist yet.

        Raises:
            DataError: `read` raised any error but those below, the tree is not one of arrays of numbers, or the block
                has another number of samples than lengths[number].
            InputError, ReportedError: `read` raised it.
            OSError: The file could not be written.
        """
        assert self._read is not None
        try:
            tree = self._read(number)
        except (InputError, ReportedError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            raise DataError(f"{self.name(number)} could not be read: {reason}") from None
        rows = to_rows(tree, self.name(number))
        if len(rows) != self.lengths[number]:
            raise DataError(f"{self.name(number)} has {len(rows)} samples, where {self.lengths[number]} were announced")
        with open(path, "xb") as file:
            np.lib.format.write_array(file, rows, allow_pickle=False)


def check_count(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")


def to_rows(tree: Any, name: str) -> np.ndarray:
    """Pack a tree of arrays (n, ...) into one structured array (n,), in which a row has one sample.

    A tree that is a single array is returned as it is, (n, ...), but contiguous.

    Args:
        tree: arrays in dicts, lists and tuples, or a single array.
        name: the name of the block, for messages.

    Raises:
        DataError: The arrays differ in their number of rows, there is no array, or a leaf is no array of numbers. Or a
            dict has a key that is no string, or just the keys "0", "1" and so on, from which to_tree() makes a tuple.
    """
    length = count_rows(tree, name)
    kind = _row_kind(tree, name)
    if kind.names is None:
        return np.ascontiguousarray(tree)
    rows = np.empty(length, kind)
    _fill(rows, tree)
    return rows


def count_rows(tree: Any, name: str) -> int:
    """Return how many samples a tree of arrays has. Raises DataError, with the name, if its arrays differ in that."""
    _row_kind(tree, name)
    lengths = set(_lengths(tree))
    if len(lengths) != 1:
        raise DataError(f"{name}: all arrays must have as many rows, got {sorted(lengths)}")
    return lengths.pop()


def to_tree(rows: np.ndarray, order: slice | np.ndarray = slice(None)) -> Any:
    """Return the tree of arrays (n, ...) that to_rows made the rows from.

    Lists of the tree come back as tuples. Each array is contiguous.

    Args:
        rows: what to_rows returned.
        order: the rows to take: a slice, by default all, or an array of indices. With indices each array is a copy;
            with a slice it may share memory with rows, so do not write to it.
    """
    names = rows.dtype.names
    if names is None:
        return np.ascontiguousarray(rows[order])
    parts = {name: to_tree(rows[name], order) for name in names}
    return tuple(parts.values()) if names == _numbered(len(names)) else parts


def open_rows(path: Path, length: int, name: str) -> np.ndarray:
    """Open a block's .npy file as a read-only memory map of its rows.

    Args:
        path: the file, which must be there.
        length: how many rows it must have.
        name: the name of the block, for messages.

    Raises:
        DataError: The file is damaged or cut short, or has another number of rows.
    """
    try:
        rows: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False, max_header_size=MOST_HEADER_BYTES)
    except ValueError as error:  # numpy raises it for a damaged header, and for a file that is cut short
        raise DataError(f"{name} is cut short, or no block: {error}") from None
    if rows.shape[:1] != (length,):
        count = len(rows) if rows.ndim else "no"
        raise DataError(f"{name} has {count} samples, where {length} were announced")
    return rows


def _row_kind(tree: Any, name: str) -> np.dtype:
    if isinstance(tree, (tuple, list)):
        return np.dtype([(str(place), _field(part, f"{name}: {place}")) for place, part in enumerate(tree)])
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree) or tuple(tree) == _numbered(len(tree)):
            raise DataError(f"{name}: the keys of a dict must be strings, and not a tuple's 0, 1, …, got {[*tree]}")
        return np.dtype([(key, _field(part, f"{name}: {key}")) for key, part in tree.items()])
    if not isinstance(tree, np.ndarray) or not tree.ndim or tree.dtype.kind not in "biufc":
        got = f"{tree.dtype} {tree.shape}" if isinstance(tree, np.ndarray) else type(tree).__name__
        raise DataError(f"{name}: samples must be arrays of numbers (n, ...), got {got}: encode them as numbers")
    return tree.dtype


def _field(tree: Any, name: str) -> np.dtype:
    kind = _row_kind(tree, name)
    return kind if kind.names is not None else np.dtype((kind, tree.shape[1:]))


def _lengths(tree: Any) -> list[int]:
    if not isinstance(tree, (dict, tuple, list)):
        return [len(tree)]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [*chain.from_iterable(_lengths(part) for part in parts)]


def _fill(rows: np.ndarray, tree: Any) -> None:
    if isinstance(tree, (dict, tuple, list)):
        parts = tree.values() if isinstance(tree, dict) else tree
        for name, part in zip(rows.dtype.names or (), parts, strict=True):
            _fill(rows[name], part)
    else:
        rows[...] = tree


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
