"""Tokenized shards: a source of records written as ArrayRecord files, each by one process from its share.

index.json of the folder lists the contents, the settings they were made with, and which shards are finished.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from maxhydra import __version__
from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import show
from maxhydra.config.migrations import migrate_config
from maxhydra.config.schema.data import READY_ROWS, Data, OnError
from maxhydra.data.formats import ConcatRecords
from maxhydra.data.formats.payload import decode_arrays, encode_arrays
from maxhydra.data.pipeline import TRAIN, Pipeline
from maxhydra.data.read_ahead import Chunks, Encoded, Encoder, IndexedChunks, StreamedChunks
from maxhydra.data.records import BadRecord, Record, Records, RecordStream, bad_record_error
from maxhydra.data.rows import Document, RowSpec
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.sources import RecordSlice, RecordSource
from maxhydra.data.tokenizers import load_tokenizer, smallest_id_dtype
from maxhydra.modelfiles import local_path
from maxhydra.modelfiles.hub import hub_commit, is_hub_id
from maxhydra.record.atomic_io import replace_file, to_json

# One record per group, uncompressed: with documents of 600 tokens, a random read takes 7 microseconds, against 9 with
# groups of 8, 11 with compression, and 22 with both. Compression would save a third of the space.
WRITER_OPTIONS = "group_size:1,uncompressed"

# Progress counters per shard in the shared array: records seen, tokens written.
COUNTERS_PER_SHARD = 2


@dataclasses.dataclass(frozen=True)
class ShardResult:
    """Counts of a finished shard."""

    shard: int
    records: int
    tokens: int
    bytes: int
    bad_records: list[BadRecord]


Enrich = Callable[[list[Document]], list[Document]]


class Shards:
    """Writes the shards of a source into a folder. Shard s of S holds the s-th share of the records, in order."""

    def __init__(self, data: Data, folder: Path, count: int, enrich: Enrich = list):
        """`enrich` transforms a list of documents before they are written."""
        self._data, self._folder, self._count, self._enrich = data, folder, count, enrich
        _check_source(data)
        # No rows are built here, so seq_len does not matter.
        self._pipeline = Pipeline(data, RowSpec(seq_len=1, vocab_size=load_tokenizer(data).vocab_size, seed=0))
        if self.records is not None and self.records < count:
            reason = f"is more than the {self.records} records of the source"
            raise ConfigError(Problem("task.shards", reason, value=count))

    def name(self, shard: int) -> str:
        return f"tokens-{shard:05d}-of-{self._count:05d}.array_record"

    @property
    def records(self) -> int | None:
        """Number of records; None if it is unknown."""
        return None if self._all_records is None else len(self._all_records)

    def sample(self, count: int) -> list[Record | BadRecord]:
        """A few records from across the source, to recognize it by; empty for a stream."""
        if self._all_records is None:
            return []
        return self._all_records.read(np.unique(np.linspace(0, len(self._all_records) - 1, count).astype(int)).tolist())

    def write(self, shard: int, counters: MutableSequence[int]) -> ShardResult:
        """Write a shard under a temporary name, and rename it once it is complete and synced to disk."""
        path = self._folder / self.name(shard)
        partial = path.with_name(f".{path.name}.partial")
        records = seen = tokens = 0
        bad_records: list[BadRecord] = []
        writer = ArrayRecordWriter(str(partial), WRITER_OPTIONS)
        for encoded in self._encoded(shard):
            bad_records += self._check_bad_records(encoded.bad_records)
            documents = self._enrich(encoded.examples)
            for document in documents:
                writer.write(encode_arrays(self._arrays(document)))
                tokens += len(document.tokens)
            records += len(documents)
            seen += len(encoded.examples) + len(encoded.bad_records)
            counters[COUNTERS_PER_SHARD * shard], counters[COUNTERS_PER_SHARD * shard + 1] = seen, tokens
        writer.close()
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
        return ShardResult(shard, records, tokens, path.stat().st_size, bad_records)

    def wrote(self, path: Path) -> bool:
        """Whether a file is a shard of this source: by its name, and the tokens of its first document."""
        shard = next((shard for shard in range(self._count) if self.name(shard) == path.name), None)
        if shard is None:
            return False
        try:
            reader = ArrayRecordReader(str(path))
            stored = decode_arrays(reader.read([0])[0])["tokens"] if reader.num_records() else None
        except Exception:  # the reader raises various types for a file that is not an ArrayRecord file
            return False
        document = next((document for encoded in self._encoded(shard) for document in encoded.examples), None)
        if stored is None or document is None:
            return stored is document
        # The teacher's documents may be cut to train.seq_len.
        length = min(len(stored), len(document.tokens))
        return length > 0 and np.array_equal(stored[:length], document.tokens[:length])

    @cached_property
    def _all_records(self) -> Records | None:
        """Training records plus those held out from the same files; None if they can only be read in order."""
        source = self._pipeline.sources[""]
        if not isinstance(source, RecordSource):
            return None
        train, held_out = source.train, source.evaluation
        if isinstance(train, RecordSlice) and isinstance(held_out, RecordSlice) and train.records is held_out.records:
            return ConcatRecords([train, held_out])
        return train

    @cached_property
    def _encoder(self) -> Encoder:
        encoder = self._pipeline.encoder("", TRAIN)
        if (records := self._all_records) is None:
            return encoder
        return dataclasses.replace(
            encoder, read=records.read, location=lambda indices, at: records.location(int(indices[at]))
        )

    def _encoded(self, shard: int) -> Iterator[Encoded]:
        """Encode the share of a shard, chunk by chunk."""
        if self._all_records is None:
            stream: RecordStream = getattr(self._pipeline.sources[""], TRAIN)
            chunks: Chunks = StreamedChunks(stream, shard, self._count)
        else:
            chunks = IndexedChunks(ShuffleOrder(len(self._all_records), 0, shuffle=False), shard, self._count)
        yield from (self._encoder(chunk.payload) for chunk in chunks.iter_from(None, 1))

    def _check_bad_records(self, bad_records: list[BadRecord]) -> list[BadRecord]:
        if bad_records and self._data.on_error is OnError["raise"]:
            raise bad_record_error(bad_records[0])
        return bad_records

    def _arrays(self, document: Document) -> dict[str, np.ndarray]:
        arrays = {"tokens": document.tokens.astype(self.dtype), **document.columns}
        if document.weights is not None:
            is_mask = np.isin(document.weights, (0, 1)).all()
            arrays["weights"] = document.weights.astype(np.uint8 if is_mask else np.float32)
        return arrays

    @cached_property
    def dtype(self) -> np.dtype:
        """Smallest dtype that holds every token id."""
        return np.dtype(smallest_id_dtype(load_tokenizer(self._data).vocab_size))


def _check_source(data: Data) -> None:
    if data.source == "mixture" or data.source in READY_ROWS:
        hint = (
            "tokenize the sources of a mixture one by one" if data.source == "mixture" else "use data=grain or data=hf"
        )
        raise ConfigError(Problem("data.source", "has no records to tokenize", value=data.source, hint=hint))
    if data.record_type not in ("text", "chat"):
        reason = "cannot be tokenized into shards"
        raise ConfigError(Problem("data.record_type", reason, value=data.record_type, accepted="text, chat"))


NAME, LOCK = "index.json", ".lock"
NO_SETTINGS: Mapping[str, Any] = {}

# Settings of `data` that the tokens depend on, in addition to those of the tokenizer.
SETTINGS = (
    *("source", "path", "eval_path", "format", "name", "config", "split", "eval_split", "eval_name", "data_dir"),
    *("record_type", "columns", "formatting", "on_error", "max_characters"),
)

# Number of source records that enter the fingerprint.
SAMPLE = 16

# Packages whose versions affect the contents of the files.
PACKAGES = ("array-record", "numpy", "tokenizers", "sentencepiece", "tiktoken")


class ShardIndex:
    """The index of a folder, rewritten after each shard; a shard that is not listed is written again."""

    def __init__(self, folder: Path, facts: dict[str, Any], done: dict[str, Any]):
        self._folder, self._facts = folder, facts
        self.done = done

    def add(self, name: str, result: ShardResult) -> None:
        """Record a finished shard."""
        self.done[name] = {
            "records": result.records,
            "tokens": result.tokens,
            "skipped": len(result.bad_records),
            "bytes": result.bytes,
        }
        self.write()

    @property
    def totals(self) -> dict[str, int]:
        """Totals over the finished shards."""
        names = ("records", "tokens", "skipped", "bytes")
        return {name: sum(shard[name] for shard in self.done.values()) for name in names}

    def write(self) -> None:
        """Replace index.json."""
        shards = dict(sorted(self.done.items()))
        complete = len(shards) == self._facts["settings"]["task.shards"]
        text = to_json({"complete": complete, **self.totals, **self._facts, "shards": shards}, indent=1)
        replace_file(self._folder / NAME, text + "\n")


@contextmanager
def open_index(
    folder: Path, data: Data, shards: Shards, count: int, more: Mapping[str, Any] = NO_SETTINGS
) -> Iterator[ShardIndex]:
    """Open the index of a folder, new or started earlier with the same settings, and lock the folder.

    `more` are further settings that the shards depend on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(Problem("task.output", "is being written by another process", value=folder)) from None
        facts = _facts(data, shards, {**more, "task.shards": count})
        before = _read(folder / NAME)
        if before:
            _check_same(before, json.loads(to_json(facts)), folder)
        elif unknown := sorted(path.name for path in folder.glob("*.array_record") if not shards.wrote(path)):
            reason = f"already holds {unknown[0]}, which this command did not write, and no {NAME}"
            raise ConfigError(Problem("task.output", reason, value=folder, hint="choose an empty folder"))
        for path in folder.glob(".tokens-*.partial"):
            path.unlink()
        done = {name: shard for name, shard in before.get("shards", {}).items() if _is_complete(folder / name, shard)}
        index = ShardIndex(folder, facts, done)
        if not before:
            # Before the first shard, so that a kill never leaves shards that no index describes.
            index.write()
        yield index


def _read(index: Path) -> dict[str, Any]:
    """Read an existing index; empty for a new folder."""
    try:
        before = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
        if not before or {"settings", "fingerprints", "shards"} <= before.keys():
            return dict(before)
        reason = f"its {NAME} was not written by task=tokenize"
    except (ValueError, AttributeError, TypeError) as error:
        reason = f"its {NAME} cannot be read: {error}"
    hint = "choose another folder, or remove this one to start over"
    raise ConfigError(Problem("task.output", reason, value=index.parent, hint=hint))


def _is_complete(path: Path, shard: dict[str, Any]) -> bool:
    return path.exists() and path.stat().st_size == shard["bytes"]


def _facts(data: Data, shards: Shards, more: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = load_tokenizer(data)
    settings = {f"data.{name}": show(getattr(data, name)) for name in SETTINGS}
    settings |= {f"data.tokenizer.{name}": show(value) for name, value in vars(data.tokenizer).items()}
    source = [shards.records, *map(repr, shards.sample(SAMPLE))]
    return {
        "settings": {**settings, **more},
        "fingerprints": {"the tokenizer's files": _digest_files(data), "the source's records": _digest(source)},
        "vocabulary": {
            "size": tokenizer.vocab_size,
            "bos": tokenizer.bos,
            "eos": tokenizer.eos,
            "dtype": shards.dtype.name,
        },
        "versions": {"maxhydra": __version__, **{name: version for name in PACKAGES if (version := _version(name))}},
    }


def _check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise if the folder was started with other settings. Package versions may differ; the first ones are kept."""
    changes = [
        f"{name} was {was} and is now {now['settings'].get(name)}"
        for name, was in migrate_config(before["settings"]).items()
        if now["settings"].get(name) != was
    ]
    for name, was in before["fingerprints"].items():
        changes += [f"{name} have changed"] if now["fingerprints"].get(name) != was else []
    if changes:
        reason = f"was started with different settings: {'; '.join(changes)}"
        hint = "choose another folder, or remove this one to start over"
        raise ConfigError(Problem("task.output", reason, value=folder, hint=hint))


def _digest_files(data: Data) -> str:
    """Digest of the tokenizer's files, or of its name if it is not a file."""
    parts = []
    for named in filter(None, (data.tokenizer.path, data.tokenizer.chat_template)):
        if is_hub_id(named):
            parts.append(hub_commit("data.tokenizer.path", named))
            continue
        path = local_path("data.tokenizer.path", named)
        files = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
        parts += [hashlib.sha256(found.read_bytes()).hexdigest() if found.exists() else named for found in files]
    return _digest(parts)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode(errors="surrogatepass")).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
