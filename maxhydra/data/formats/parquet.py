"""Parquet through pyarrow: a row group is decoded as a whole and cached while its records are shuffled."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.data.formats.file_cache import FileCache, Group, Unreadable
from maxhydra.data.records import BadRecord, Record, Records, need


def rows_to_records(columns: Mapping[str, Any], rows: np.ndarray) -> list[Record | str]:
    """Convert rows of a table's columns to records; a row that cannot be read becomes the reason, a string."""
    try:
        values = [_values(column, rows) for column in columns.values()]
        return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    except ValueError as error:
        # Arrow validates text only when it is read, and one row that is not UTF-8 fails them all: read them separately.
        if len(rows) == 1:
            return [f"is not valid UTF-8: {error}"]
    return [rows_to_records(columns, rows[at : at + 1])[0] for at in range(len(rows))]


def _values(column: Any, rows: np.ndarray) -> list[Any]:
    """Values of some rows. Lists of numbers become arrays, without a Python object for each number."""
    if _is_numeric_list(column):
        offsets, numbers = np.from_dlpack(column.offsets), np.from_dlpack(column.values)
        return [numbers[offsets[row] : offsets[row + 1]] for row in rows.tolist()]
    # As a list: given a NumPy array, pyarrow imports pandas, which takes a second.
    chosen = column.take(need("pyarrow", "data.format=parquet").array(rows.tolist()))
    values: list[Any] = chosen.to_pylist()
    return values


def _is_numeric_list(column: Any) -> bool:
    """True if a column holds lists of numbers without nulls."""
    types = need("pyarrow", "data.format=parquet").types
    if not (types.is_list(column.type) or types.is_large_list(column.type)):
        return False
    numeric = types.is_integer(column.type.value_type) or types.is_floating(column.type.value_type)
    return numeric and not column.null_count and not column.values.null_count


SETTING = "data.format=parquet"


def open_file(path: Path, file_cache: FileCache) -> Records:
    arrow = need("pyarrow", SETTING)
    try:
        with need("pyarrow.parquet", SETTING).ParquetFile(path) as file:
            return ParquetFile(path, file_cache, file.metadata, file.schema_arrow.names)
    except (arrow.ArrowException, OSError, ValueError, TypeError) as error:
        return Unreadable(path, f"not a complete Parquet file: {error}")


class ParquetFile:
    """Records of one Parquet file."""

    def __init__(self, path: Path, file_cache: FileCache, metadata: Any, names: Sequence[str]):
        self._path, self._file_cache, self._metadata = path, file_cache, metadata
        # If a column is missing, read all of them, so that the error can list the columns.
        known = file_cache.columns is not None and set(file_cache.columns) <= set(names)
        self._columns = list(file_cache.columns or ()) if known else None
        self._sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._ends = np.cumsum(self._sizes)
        self._starts = self._ends - self._sizes

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def groups(self) -> list[int] | None:
        return [size for size in self._sizes if size]

    def location(self, index: int) -> str:
        return f"{self._path}, row {index}"

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        requested = np.asarray(indices, np.int64)
        owner = np.searchsorted(self._ends, requested, "right")
        result: dict[int, Record | BadRecord] = {}
        for number in np.unique(owner).tolist():
            positions = np.flatnonzero(owner == number)
            group = self._file_cache.groups.get((self._path, number), partial(self._read_group, number)).value
            rows = requested[positions] - self._starts[number]
            records = [group] * len(rows) if isinstance(group, str) else rows_to_records(group, rows)
            for at, record in zip(positions.tolist(), records, strict=True):
                result[at] = BadRecord(self.location(int(requested[at])), record) if isinstance(record, str) else record
        return [result[at] for at in range(len(requested))]

    def _read_group(self, number: int) -> Group:
        """Read the columns of a row group, or the reason why they cannot be read."""
        arrow = need("pyarrow", SETTING)
        try:
            # A ParquetFile is not thread-safe; with the metadata already read, opening another one is almost free.
            options = {"metadata": self._metadata, "page_checksum_verification": True}
            with need("pyarrow.parquet", SETTING).ParquetFile(self._path, **options) as file:
                table = file.read_row_group(number, columns=self._columns, use_threads=False)
        except (arrow.ArrowException, OSError, ValueError, TypeError) as error:
            return Group(f"row group {number} cannot be read: {error}", 0)
        return Group({name: table.column(name).combine_chunks() for name in table.column_names}, table.nbytes)
