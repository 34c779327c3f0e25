"""Export runs as one table with a row per run, as CSV, Parquet, or a pandas DataFrame."""

import csv
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record.redact import redact_value
from maxhydra.runs.query import select_runs
from maxhydra.runs.registry import Registry, Run

if TYPE_CHECKING:
    import pandas

Table = dict[str, list[Any]]


def run_table(registry: Registry, runs: Sequence[Run]) -> Table:
    """Map columns to values: fields of the run, all settings, and the last value of every metric.

    Metric columns are prefixed with `metric:`, because a group or a setting may have the same name.
    """
    names = [name for name in Run._fields if name not in ("id", "change", "tags")]
    columns: Table = {name: [getattr(run, name) for run in runs] for name in names}
    columns["tags"] = [",".join(run.tags) for run in runs]
    columns = {name: [_redact(name, value) for value in values] for name, values in columns.items()}
    ids = [run.id for run in runs]
    for prefix, by_run in (("", registry.settings(ids)), ("metric:", registry.metrics(ids))):
        for key in dict.fromkeys(key for values in by_run.values() for key in values):
            name = f"{prefix}{key}" if f"{prefix}{key}" not in columns else f"config:{key}"
            columns[name] = [_redact(key, by_run[id].get(key)) for id in ids]
    return columns


@functools.lru_cache(maxsize=65536)
def _redact(key: str, value: Any) -> Any:
    """Redact the values of runs of older versions, whose files contain secrets. Cached: most values are repeated."""
    return redact_value(key, value) if isinstance(value, str) else value


def frame(outputs: Path | str = "outputs", *conditions: str) -> "pandas.DataFrame":
    """Runs that match the conditions as a DataFrame: `frame("outputs", "status=finished", "eval/loss<2")`."""
    import pandas  # noqa: PLC0415

    registry = Registry(outputs)
    return pandas.DataFrame(run_table(registry, select_runs(registry, conditions)))


def write_csv(columns: Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_parquet(columns: Table, path: Path) -> None:
    """Write Parquet. A column with mixed types, such as a setting that is a number or null, becomes text."""
    try:
        import pyarrow  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise ConfigError(Problem("pyarrow", "is required to write Parquet", hint="pip install pyarrow")) from None
    arrays = {name: pyarrow.array(_uniform(values)) for name, values in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)


def _uniform(values: list[Any]) -> list[Any]:
    types = {type(value) for value in values if value is not None}
    if types <= {int, float} and len(types) == 2:
        return [None if value is None else float(value) for value in values]
    return values if len(types) <= 1 else [None if value is None else str(value) for value in values]


WRITERS: dict[str, Callable[[Table, Path], None]] = {".csv": write_csv, ".parquet": write_parquet}
