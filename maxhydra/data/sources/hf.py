"""Hugging Face datasets: local files, save_to_disk folders and hub datasets, downloaded or streamed.

A stream is read in the order of its files; each share reads separate files if they divide evenly, else every n-th
record. A shuffle buffer would lose its records when a run resumes, so only the rows of a packing window are shuffled.
"""

import copy
import dataclasses
import logging
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.files import find_files
from maxhydra.data.formats.parquet import rows_to_records
from maxhydra.data.records import BadRecord, Cursor, Record, Records, RecordStream, need
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource, StreamSource, hold_out, named_files

SETTING = "data.source=hf"

# Builder names of `datasets` by file name ending.
BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".json.gz": "json",
    ".jsonl.gz": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}

# Files that save_to_disk writes for one split, and for several.
SAVED = ("state.json", "dataset_dict.json")


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource | StreamSource:
    need("datasets", SETTING).disable_progress_bars()
    # Its warnings repeat the error, and retries are not interesting.
    logging.getLogger("datasets").setLevel(logging.ERROR)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    train = _load(corpus, data, path=corpus.path, split=corpus.split)
    held_out = corpus.eval_path is not None or corpus.eval_split is not None or corpus.eval_name is not None
    evaluation = None
    if held_out:
        named = dataclasses.replace(corpus, name=corpus.eval_name or corpus.name)
        path = corpus.eval_path or (None if corpus.eval_name else corpus.path)
        # A slice of the training files, such as train[:90%], does not apply to the evaluation files.
        split = corpus.split.partition("[")[0] if corpus.eval_path else corpus.split
        evaluation = _load(named, data, path=path, split=corpus.eval_split or split)
    title = corpus.name or corpus.path or ""
    if corpus.streaming:
        eval_stream: RecordStream = HfStream(title, evaluation) if evaluation is not None else NoEvaluationStream()
        return StreamSource(train=HfStream(title, train), evaluation=eval_stream)
    records: Records = HfRecords(title, train)
    if evaluation is None:
        return hold_out(records, corpus.eval_fraction)
    return RecordSource(train=records, evaluation=HfRecords(title, evaluation))


def input_files(corpus: Corpus, data: Data) -> dict[str, list[Path]]:
    """Local files and saved datasets. Datasets of the hub are not covered: the library caches them by revision."""
    found: dict[str, list[Path]] = {}
    for field in ("name", "eval_name", "path", "eval_path"):
        location = getattr(corpus, field)
        if location is None or "://" in location or (corpus.name is not None and "path" in field):
            continue
        folder = Path(location).expanduser()
        if "name" in field or any((folder / name).is_file() for name in SAVED):
            # The library writes the caches of transformed datasets next to the data.
            files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith((".", "cache-")))
            found |= {field: sorted(files)} if folder.is_dir() else {}
        else:
            found |= named_files(corpus, data, tuple(BUILDERS), [field])
    return found


def _load(corpus: Corpus, data: Data, *, path: str | None, split: str) -> Any:
    """Load the dataset that a corpus names; any failure becomes one short message."""
    library = need("datasets", SETTING)
    folder = Path(corpus.name or path or "").expanduser()
    if any((folder / name).is_file() for name in SAVED):
        return _select_split(library.load_from_disk(str(folder)), corpus, split)
    options: dict[str, Any] = {"split": split, "streaming": corpus.streaming}
    if corpus.name is None:
        assert path is not None
        options |= _files(path, data, streaming=corpus.streaming)
    else:
        options |= {"path": corpus.name, "name": corpus.config, "data_dir": corpus.data_dir}
        options["data_files"] = None if path is None else [part.strip() for part in path.split(";")]
    try:
        return library.load_dataset(**options)
    except Exception as error:  # datasets passes on any error of its readers and of the network
        raise _load_error(corpus, error) from None


def _files(path: str, data: Data, *, streaming: bool) -> dict[str, Any]:
    """Arguments of load_dataset for files of one kind. A stream reads remote files in place."""
    names = [part.strip() for part in path.split(";")]
    if not (streaming and all("://" in name for name in names)):
        names = [str(file) for file in find_files(path, data.cache, endings=tuple(BUILDERS))]
    kinds = {_builder(name) for name in names}
    if len(kinds) > 1:
        reason = f"has files of several kinds: {', '.join(sorted(kinds))}"
        raise ConfigError(Problem("data.path", reason, value=path, hint="use data=mixture with one source per kind"))
    # A plain list makes all files one split, train, whatever their names.
    return {"path": kinds.pop(), "data_files": names, "cache_dir": str(_cache(data))}


def _cache(data: Data) -> Path:
    return Path(data.cache).expanduser() / "hf"


def _builder(name: str) -> str:
    for ending, builder in BUILDERS.items():
        if name.endswith(ending):
            return builder
    accepted = ", ".join(BUILDERS)
    raise ConfigError(
        Problem("data.path", "has a file name ending that data=hf cannot read", value=name, accepted=accepted)
    )


def _select_split(dataset: Any, corpus: Corpus, split: str) -> Any:
    """Select a split of a saved dataset; a dataset without splits is named train, or by its original split."""
    splits = dataset if isinstance(dataset, dict) else {"train": dataset, str(dataset.split or "train"): dataset}
    if split not in splits:
        reason = "is not a split of the saved dataset"
        raise ConfigError(Problem("data.split", reason, value=split, accepted=", ".join(splits)))
    dataset = splits[split]
    return dataset.to_iterable_dataset() if corpus.streaming else dataset


def _load_error(corpus: Corpus, error: BaseException) -> ConfigError:
    """One-line error; of chained errors the innermost is the most specific."""
    while error.__cause__ is not None:
        error = error.__cause__
    reason = f"cannot be loaded: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
    path, value = ("data.path", corpus.path) if corpus.name is None else ("data.name", corpus.name)
    return ConfigError(Problem(path, reason, value=value))


class HfRecords:
    """Records of a memory-mapped dataset on the local disk."""

    groups = None

    def __init__(self, title: str, dataset: Any):
        self._title, self._dataset = title, dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def location(self, index: int) -> str:
        return f"{self._title}, record {index}"

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        table = self._dataset[[int(index) for index in indices]]
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        rows = zip(indices, rows_to_records(columns, np.arange(len(indices))), strict=True)
        return [BadRecord(self.location(int(index)), row) if isinstance(row, str) else row for index, row in rows]


class HfStream:
    """Record stream of a streamed dataset. A cursor is the dataset's own state plus the number of records before it."""

    def __init__(self, title: str, dataset: Any):
        # Datasets derived from one another share their counters. They are designed to be pickled for workers, so each
        # share gets a private copy by pickling; copy.deepcopy fails in threads, on a cache of file systems.
        self._title, self._packed = title, pickle.dumps(dataset)

    def location(self, number: int) -> str:
        return f"{self._title}, record {number} of its share"

    def iter_from(
        self, cursor: Cursor | None, *, share: int, shares: int
    ) -> Iterator[tuple[Record | BadRecord, Cursor]]:
        distributed = need("datasets.distributed", SETTING)
        shard = distributed.split_dataset_by_node(pickle.loads(self._packed), rank=share, world_size=shares)
        number = 0
        if cursor is not None:
            shard.load_state_dict(copy.deepcopy(cursor["state"]))
            number = int(cursor["number"])
        records = iter(shard)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # readers may raise anything, and cannot continue afterwards
                reason = f"cannot be read beyond record {number} of share {share}: {error}"
                raise ConfigError(Problem("data", reason, value=self._title)) from None
            number += 1
            yield record, {"number": number, "state": shard.state_dict()}


class NoEvaluationStream:
    """Placeholder that raises when evaluated: a stream has no known end to hold out records from."""

    def location(self, number: int) -> str:
        return f"record {number}"

    def iter_from(
        self, cursor: Cursor | None, *, share: int, shares: int
    ) -> Iterator[tuple[Record | BadRecord, Cursor]]:
        reason = "must be set to evaluate with data.streaming=true, because nothing can be held out from a stream"
        accepted = "a split, or files in data.eval_path"
        raise ConfigError(Problem("data.eval_split", reason, value=None, accepted=accepted))
        yield
