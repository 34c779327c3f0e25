"""Convert rows of Arrow tables to records."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxhydra.data.optional_packages import need
from maxhydra.data.records import Record


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
