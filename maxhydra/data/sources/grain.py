"""Record files (ArrayRecord, Parquet, TFRecord, JSON Lines, also mixed) with random access by index.

Of Grain itself only the index shuffle is used (data/shuffle.py); docs/architecture.md says why.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Corpus, Data, OnError
from maxhydra.data.files import find_files
from maxhydra.data.formats import ENDINGS, ConcatRecords, open_files
from maxhydra.data.formats.file_cache import FileCache, Unreadable
from maxhydra.data.records import Records
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource, columns_of, hold_out, named_files

# Index that task=tokenize writes next to its shards.
INDEX = "index.json"
# Unreadable files that one error lists.
MAX_SHOWN = 5

log = logging.getLogger("maxhydra")


def input_files(corpus: Corpus, data: Data) -> dict[str, list[Path]]:
    return named_files(corpus, data, _endings())


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    assert corpus.path is not None
    train = open_records(corpus.path, corpus, data)
    if corpus.eval_path is None:
        return hold_out(train, corpus.eval_fraction)
    return RecordSource(train=train, evaluation=open_records(corpus.eval_path, corpus, data))


def open_records(names: str, corpus: Corpus, data: Data) -> Records:
    """Open the records of the named files."""
    paths = find_files(names, data.cache, endings=_endings())
    # Other record types read optional columns too, such as weights next to tokens.
    columns = columns_of(corpus) if corpus.record_type == "text" else None
    _check_finished(paths)
    file_cache = FileCache(Path(data.cache).expanduser(), columns)
    files = open_files(paths, corpus.format, file_cache)
    _check_readable(files)
    _check_empty([path for path, file in zip(paths, files, strict=True) if not len(file)], data)
    return ConcatRecords(files)


def _endings() -> tuple[str, ...]:
    return tuple(ending for of_format in ENDINGS.values() for ending in of_format)


def _check_readable(files: Sequence[Records]) -> None:
    """Raise if none of the files can be read. With others to read, a bad file is one bad record (data.on_error)."""
    unreadable = [file for file in files if isinstance(file, Unreadable)]
    if len(unreadable) == len(files):
        raise ConfigError([Problem("data.path", file.reason, value=file.path) for file in unreadable[:MAX_SHOWN]])


def _check_finished(paths: Sequence[Path]) -> None:
    """Raise if a folder holds an unfinished task=tokenize output."""
    for folder in sorted({path.parent for path in paths}):
        index = _read_index(folder / INDEX)
        if index.get("complete") is False:
            reason = (
                f"task=tokenize has written only {len(index['shards'])} of {index['settings']['task.shards']} shards"
            )
            hint = "run the same task=tokenize command again to resume it"
            raise ConfigError(Problem("data.path", reason, value=folder, hint=hint))


def _read_index(path: Path) -> dict[str, Any]:
    """Read the index of task=tokenize; empty if the file is missing or was written by another program."""
    try:
        index = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        hint = "it may be an incomplete copy; remove it if task=tokenize did not write it"
        raise ConfigError(Problem("data.path", f"cannot be read: {error}", value=path, hint=hint)) from None
    settings = index.get("settings") if isinstance(index, dict) else None
    return index if isinstance(settings, dict) and "task.shards" in settings else {}


def _check_empty(paths: Sequence[Path], data: Data) -> None:
    for path in paths:
        if data.on_error is OnError["raise"]:
            hint = "remove it, or set data.on_error=skip to skip empty files"
            raise ConfigError(Problem("data.path", "the file has no records", value=path, hint=hint))
        log.warning("skipped %s: the file has no records", path)
