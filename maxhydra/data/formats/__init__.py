"""Files of records. A module of this package is one file format, chosen by `format` or by the name's ending.

Each has `open_file(path, shelf) -> Records`; a file that cannot be opened at all is one bad record.
"""

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.corpus import FileFormat
from maxhydra.data.files import without_shard
from maxhydra.data.formats.file_cache import FileCache
from maxhydra.data.records import BadRecord, Record, Records

ENDINGS = {
    FileFormat.arrayrecord: (".array_record", ".arrayrecord"),
    FileFormat.parquet: (".parquet",),
    FileFormat.tfrecord: (".tfrecord", ".tfrecords"),
    FileFormat.jsonl: (".jsonl", ".ndjson", ".jsonl.gz", ".json.gz"),
}

# A .json beside other files is most often no data, so a folder does not stand for those in it.
NAMED_ONLY = {".json": FileFormat.jsonl}

# Files that are opened at a time: most of it is waiting for a disk.
OPENERS = 16

# Records of a file without groups that are shuffled as one, where files with groups stand beside it.
RUN = 128


def format_of(path: Path) -> FileFormat:
    """The format that a name's ending tells."""
    name = without_shard(path.name)
    for kind, endings in ENDINGS.items():
        if name.endswith(endings):
            return kind
    if path.suffix in NAMED_ONLY:
        return NAMED_ONLY[path.suffix]
    known = ", ".join(ending for endings in ENDINGS.values() for ending in endings)
    hint = f"set data.format to one of {', '.join(kind.name for kind in ENDINGS)}"
    raise ConfigError(Problem("data.path", "has an ending of no known format", value=path, accepted=known, hint=hint))


def open_files(paths: Sequence[Path], form: FileFormat, file_cache: FileCache) -> list[Records]:
    """Files of one format or of several, in order."""
    forms = [format_of(path) if form is FileFormat.auto else form for path in paths]
    modules = {name: importlib.import_module(f"{__name__}.{name.name}") for name in set(forms)}
    with ThreadPoolExecutor(min(OPENERS, len(paths))) as pool:
        return list(pool.map(partial(_open, file_cache), paths, [modules[name] for name in forms]))


def _open(file_cache: FileCache, path: Path, module: object) -> Records:
    if not path.stat().st_size:
        return ConcatRecords([])
    opened: Records = module.open_file(path, file_cache)  # type: ignore[attr-defined]
    return opened


class ConcatRecords:
    """Several files as one: the records of the first, then those of the second, and so on."""

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
        found: dict[int, Record | BadRecord] = {}
        for file in np.unique(owner).tolist():
            places = np.flatnonzero(owner == file)
            records = self._files[file].read(local[places].tolist())
            found.update(zip(places.tolist(), records, strict=True))
        return [found[location] for location in range(len(requested))]

    def location(self, index: int) -> str:
        file = int(np.searchsorted(self._ends, index, "right"))
        return self._files[file].location(index - int(self._starts[file]))

    @property
    def groups(self) -> list[int] | None:
        groups = [file.groups for file in self._files]
        if all(of_file is None for of_file in groups):
            return None
        sizes: list[int] = []
        for file, of_file in zip(self._files, groups, strict=True):
            sizes += split_into_runs(len(file), RUN) if of_file is None else of_file
        return sizes


def split_into_runs(length: int, size: int) -> list[int]:
    """Sizes of consecutive runs that make up a length; the last may be shorter."""
    return [min(size, length - start) for start in range(0, length, size)]
