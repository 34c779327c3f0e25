"""File formats of records. One module per format, chosen by data.format or by the file name's ending.

Each module has `open_file(path, file_cache) -> Records`; a file that cannot be opened counts as one bad record.
"""

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import FileFormat
from maxhydra.data.files import without_shard
from maxhydra.data.formats.file_cache import FileCache
from maxhydra.data.records import BadRecord, Record, Records

ENDINGS = {
    FileFormat.arrayrecord: (".array_record", ".arrayrecord"),
    FileFormat.parquet: (".parquet",),
    FileFormat.tfrecord: (".tfrecord", ".tfrecords"),
    FileFormat.jsonl: (".jsonl", ".ndjson", ".jsonl.gz", ".json.gz"),
}

# A .json file next to data files is usually metadata, so a folder does not include it; it must be named.
NAMED_ONLY = {".json": FileFormat.jsonl}

# Files that are opened in parallel: most of the time is spent waiting for the disk.
OPENERS = 16

# Group size used for a file without groups when it is mixed with files that have groups.
RUN = 128


def format_of(path: Path) -> FileFormat:
    """File format by the ending of the name."""
    name = without_shard(path.name)
    for kind, endings in ENDINGS.items():
        if name.endswith(endings):
            return kind
    if path.suffix in NAMED_ONLY:
        return NAMED_ONLY[path.suffix]
    known = ", ".join(ending for endings in ENDINGS.values() for ending in endings)
    hint = f"set data.format to one of {', '.join(kind.name for kind in ENDINGS)}"
    raise ConfigError(Problem("data.path", "has an unknown file name ending", value=path, accepted=known, hint=hint))


def open_files(paths: Sequence[Path], file_format: FileFormat, file_cache: FileCache) -> list[Records]:
    """Open files, all of one format or each by its ending, in order."""
    formats = [format_of(path) if file_format is FileFormat.auto else file_format for path in paths]
    modules = {name: importlib.import_module(f"{__name__}.{name.name}") for name in set(formats)}
    with ThreadPoolExecutor(min(OPENERS, len(paths))) as pool:
        return list(pool.map(partial(_open, file_cache), paths, [modules[name] for name in formats]))


def _open(file_cache: FileCache, path: Path, module: object) -> Records:
    if not path.stat().st_size:
        return ConcatRecords([])
    opened: Records = module.open_file(path, file_cache)  # type: ignore[attr-defined]
    return opened


class ConcatRecords:
    """Several `Records` concatenated into one."""

    def __init__(self, files: Sequence[Records]):
        self._files = files
        sizes = np.array([len(file) for file in files], np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        requested = np.asarray(indices, np.int64)
        owner = np.searchsorted(self._ends, requested, "right")
        local = requested - self._starts[owner]
        records: dict[int, Record | BadRecord] = {}
        for file in np.unique(owner).tolist():
            positions = np.flatnonzero(owner == file)
            read = self._files[file].read(local[positions].tolist())
            records.update(zip(positions.tolist(), read, strict=True))
        return [records[position] for position in range(len(requested))]

    def location(self, index: int) -> str:
        file = int(np.searchsorted(self._ends, index, "right"))
        return self._files[file].location(index - int(self._starts[file]))

    @property
    def groups(self) -> list[int] | None:
        groups = [file.groups for file in self._files]
        if all(file_groups is None for file_groups in groups):
            return None
        sizes: list[int] = []
        for file, file_groups in zip(self._files, groups, strict=True):
            sizes += split_into_runs(len(file), RUN) if file_groups is None else file_groups
        return sizes


def split_into_runs(length: int, size: int) -> list[int]:
    """Sizes of consecutive runs that add up to `length`; the last may be shorter."""
    return [min(size, length - start) for start in range(0, length, size)]
