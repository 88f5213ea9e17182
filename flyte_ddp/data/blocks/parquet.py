"""Parquet files as blocks. Each row group is a block."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.data.blocks.blocks import Blocks
from flyte_ddp.data.remote_files import Stored, StoredFile
from flyte_ddp.errors import DataError, InputError, not_installed

try:
    import pyarrow as pa
    from pyarrow import parquet
except ModuleNotFoundError:
    pa = None

FOOTERS_AT_ONCE = 16  # reading a footer takes a request or two


class Parquet(Blocks):
    """The row groups of the Parquet files in a folder, or of one file. Its samples are dicts of arrays by column.

    Columns of numbers become arrays (n,). Columns of lists of one length become arrays (n, length), and nested ones
    likewise.
    """

    def __init__(self, url: str | Path, columns: Sequence[str]):
        """Read the files' footers.

        Args:
            url: the folder or file: s3://, gs://, abfs://, file:// or a path. Hidden files, and those that begin with
                an underscore, are left out.
            columns: the names of the columns to read.

        Raises:
            DataError: there are no rows, or a column is missing or of another type in one of the files.
        """
        if pa is None:
            raise InputError(not_installed("Parquet needs pyarrow", "parquet"))
        self.stored = Stored(url)
        self.columns = list(columns)
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise InputError(f"columns must be names, each once, got {self.columns}")
        sizes = self.stored.sizes()
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
            footers = zip(sizes, pool.map(self._footer, sizes, sizes.values()), strict=True)
            self._footers = {file: footer for file, footer in footers if footer.num_rows}
        kinds = {file: self._read_kinds(file, footer) for file, footer in self._footers.items()}
        for file, types in kinds.items():
            expected = next(iter(kinds.values()))
            if types != expected:
                raise DataError(f"{self.stored.name(file)} has columns of {types}, where others have {expected}")
        self._sizes = sizes
        self._groups: list[tuple[str, int]] = []
        for file, footer in self._footers.items():
            groups = range(footer.num_row_groups)
            self._groups += [(file, group) for group in groups if footer.row_group(group).num_rows]
        if not self._groups:
            raise DataError(f"{self.stored.url} has no rows", "it must be a folder of Parquet files, or one of them")
        rows = [self._footers[file].row_group(group).num_rows for file, group in self._groups]
        super().__init__(rows, self._read_group)

    def name(self, number: int) -> str:
        file, group = self._groups[number]
        return f"{self.stored.name(file)}, row group {group}"

    def _footer(self, file: str, size: int) -> Any:
        if not size:
            raise DataError(f"{self.stored.name(file)} is empty", "write it again, or remove it")
        try:
            return parquet.read_metadata(pa.PythonFile(StoredFile(self.stored, file, size), mode="r"))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.stored.name(file)} is no Parquet file, or cut short: {error}") from None

    def _read_kinds(self, file: str, footer: Any) -> tuple[str, ...]:
        schema = footer.schema.to_arrow_schema()
        missing = [column for column in self.columns if column not in schema.names]
        if missing:
            raise DataError(f"{self.stored.name(file)} has no column {missing[0]}, but {', '.join(schema.names)}")
        return tuple(str(schema.field(column).type) for column in self.columns)

    def _read_group(self, number: int) -> dict[str, np.ndarray]:
        file, group = self._groups[number]
        opened = pa.PythonFile(StoredFile(self.stored, file, self._sizes[file]), mode="r")
        try:
            # With pre_buffer, columns that lie side by side need one request together
            source = parquet.ParquetFile(opened, metadata=self._footers[file], pre_buffer=True)
            table = source.read_row_group(group, columns=self.columns)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.name(number)} is damaged: {error}", "write the file again") from None
        return {column: self._array(table[column].combine_chunks(), column, number) for column in self.columns}

    def _array(self, column: Any, name: str, number: int) -> np.ndarray:
        if column.null_count:
            raise DataError(f"{self.name(number)}: column {name} has empty values: fill them in, or leave it out")
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            lengths = set(column.value_lengths().to_pylist())
            if len(lengths) > 1:
                raise DataError(f"{self.name(number)}: lists in column {name} must have one length, got {lengths}")
        elif not pa.types.is_fixed_size_list(column.type):
            return np.asarray(column.to_numpy(zero_copy_only=False))
        values = self._array(column.flatten(), name, number)
        return values.reshape(len(column), -1, *values.shape[1:])
