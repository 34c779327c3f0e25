"""Records from the columns of an Arrow table."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxhydra.data.optional_packages import need
from maxhydra.data.records import Record


def rows_to_records(columns: Mapping[str, Any], rows: np.ndarray) -> list[Record | str]:
    """Some rows of the columns of a table, each an array of its own: a record, or why there is none."""
    try:
        values = [_values(column, rows) for column in columns.values()]
        return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    except ValueError as error:
        # Arrow does not look into text before it is asked for, and one row that is no UTF-8 spoils all.
        if len(rows) == 1:
            return [f"not UTF-8: {error}"]
    return [rows_to_records(columns, rows[at : at + 1])[0] for at in range(len(rows))]


def _values(column: Any, rows: np.ndarray) -> list[Any]:
    """The values of some rows. Lists of numbers become arrays, without a Python object for each number."""
    if _has_numbers(column):
        offsets, numbers = np.from_dlpack(column.offsets), np.from_dlpack(column.values)
        return [numbers[offsets[row] : offsets[row + 1]] for row in rows.tolist()]
    # As a list, since pyarrow takes a NumPy array only after importing pandas, which takes a second.
    chosen = column.take(need("pyarrow", "data.format=parquet").array(rows.tolist()))
    values: list[Any] = chosen.to_pylist()
    return values


def _has_numbers(column: Any) -> bool:
    """Whether a column holds lists of numbers, with none missing."""
    types = need("pyarrow", "data.format=parquet").types
    if not (types.is_list(column.type) or types.is_large_list(column.type)):
        return False
    numeric = types.is_integer(column.type.value_type) or types.is_floating(column.type.value_type)
    return numeric and not column.null_count and not column.values.null_count
