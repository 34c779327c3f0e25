"""All runs as one table, a row each: for a spreadsheet, Parquet, or pandas."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.query import select
from maxhydra.runs.registry import Registry, Run

if TYPE_CHECKING:
    import pandas

Table = dict[str, list[Any]]


def table(registry: Registry, runs: Sequence[Run]) -> Table:
    """Column -> values: the run's own fields, every setting, and the last value of every metric (`metric:` before it,
    because a group or a setting may have the same name)."""
    names = [name for name in Run._fields if name not in ("id", "change", "tags")]
    columns: Table = {name: [getattr(run, name) for run in runs] for name in names}
    columns["tags"] = [",".join(run.tags) for run in runs]
    ids = [run.id for run in runs]
    for prefix, found in (("", registry.settings(ids)), ("metric:", registry.metrics(ids))):
        for key in dict.fromkeys(key for values in found.values() for key in values):
            name = f"{prefix}{key}" if f"{prefix}{key}" not in columns else f"config:{key}"
            columns[name] = [found[id].get(key) for id in ids]
    return columns


def frame(outputs: Path | str = "outputs", *conditions: str) -> "pandas.DataFrame":
    """The runs that meet the conditions, as pandas has them: `frame("outputs", "status=finished", "eval/loss<2")`."""
    import pandas  # noqa: PLC0415

    registry = Registry(outputs)
    return pandas.DataFrame(table(registry, select(registry, conditions)))


def write_csv(columns: Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_parquet(columns: Table, path: Path) -> None:
    """A column whose values are not of one kind, such as a setting that is a number here and null there, is text."""
    try:
        import pyarrow  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise ConfigError(Problem("pyarrow", "is needed to write Parquet", hint="pip install pyarrow")) from None
    arrays = {name: pyarrow.array(_alike(values)) for name, values in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)


def _alike(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and len(kinds) == 2:
        return [None if value is None else float(value) for value in values]
    return values if len(kinds) <= 1 else [None if value is None else str(value) for value in values]


WRITERS: dict[str, Callable[[Table, Path], None]] = {".csv": write_csv, ".parquet": write_parquet}
