"""Files of records: ArrayRecord, Parquet, TFRecord and JSON Lines, alone or side by side, by index."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data, OnError
from maxhydra.data.files import find_files
from maxhydra.data.formats import ENDINGS, ConcatRecords, open_files
from maxhydra.data.formats.file_cache import FileCache
from maxhydra.data.records import Records
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource, columns_of, hold_out

# What task=tokenize writes beside its shards.
INDEX = "index.json"

log = logging.getLogger("maxhydra")


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    assert corpus.path is not None
    train = open_records(corpus.path, corpus, data)
    if corpus.eval_path is None:
        return hold_out(train, corpus.eval_fraction)
    return RecordSource(train=train, evaluation=open_records(corpus.eval_path, corpus, data))


def open_records(names: str, corpus: Corpus, data: Data) -> Records:
    """The records of the files that some names give."""
    endings = tuple(ending for of_format in ENDINGS.values() for ending in of_format)
    paths = find_files(names, data.cache, endings=endings)
    # Other shapes look for columns that need not be there, such as weights beside tokens.
    columns = columns_of(corpus) if corpus.record_type == "text" else None
    _check_finished(paths)
    shelf = FileCache(Path(data.cache).expanduser(), columns)
    files = open_files(paths, corpus.format, shelf)
    _check_empty([path for path, file in zip(paths, files, strict=True) if not len(file)], data)
    return ConcatRecords(files)


def _check_finished(paths: Sequence[Path]) -> None:
    """A folder that task=tokenize has begun is not trained on before it is done."""
    for folder in sorted({path.parent for path in paths}):
        facts = _facts(folder / INDEX)
        if facts.get("complete") is False:
            reason = (
                f"task=tokenize has written {len(facts['shards'])} of its {facts['settings']['task.shards']} shards"
            )
            hint = "give the same task=tokenize command again, and it goes on"
            raise ConfigError(Problem("data.path", reason, value=folder, hint=hint))


def _facts(index: Path) -> dict[str, Any]:
    """What task=tokenize tells of its shards; nothing where there is no such file, or one of another make."""
    try:
        facts = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
    except ValueError as error:
        hint = "is it a copy in part? remove it if task=tokenize did not write it"
        raise ConfigError(Problem("data.path", f"cannot be read: {error}", value=index, hint=hint)) from None
    settings = facts.get("settings") if isinstance(facts, dict) else None
    return facts if isinstance(settings, dict) and "task.shards" in settings else {}


def _check_empty(paths: Sequence[Path], data: Data) -> None:
    for path in paths:
        if data.on_error is OnError["raise"]:
            hint = "remove it, or pass over such files with data.on_error=skip"
            raise ConfigError(Problem("data.path", "the file holds no records", value=path, hint=hint))
        log.warning("skipped %s: the file holds no records", path)
