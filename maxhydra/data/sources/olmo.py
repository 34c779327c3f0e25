"""OLMo token shards: flat files of token ids with a JSON index, cut into sequences of a fixed length.

data.path names the index:

    {"format_version": "1", "sequence_length": 8192, "dtype": "uint32", "tokenizer": "allenai/dolma3-tokenizer",
     "files": [{"path": "gs://bucket/x/part-000.npy", "label": "web", "n_tokens": 81920, ...}, ...], ...}

Row i of a file is tokens i * sequence_length to (i + 1) * sequence_length - 1; the remainder at its end is unused. Rows
of consecutive files follow each other. The files have no header despite their name; one with a NumPy header is read
too. `n_instances`, `instance_offset`, the totals, `tokenizer` and `fingerprint` are redundant and ignored. The last
token of a row is only a target, and documents attend to each other, as in OLMo's own training.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.files import find_files
from maxhydra.data.formats.file_cache import HANDLES, LruCache
from maxhydra.data.rows import Row, Rows, RowSpec, make_row
from maxhydra.data.sources import RowSource, named_files

VERSION = "1"
MAGIC = b"\x93NUMPY"

# A sequence in which a run of 1 to LONGEST_PERIOD tokens repeats at least TIMES times in succession has no loss.
LONGEST_PERIOD = 13
MIN_REPEATS = 32


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RowSource:
    assert corpus.path is not None
    train = _read_index(corpus.path, corpus, data, spec)
    if corpus.eval_path is not None:
        return RowSource(train=train, evaluation=_read_index(corpus.eval_path, corpus, data, spec))
    boundary = len(train) - min(max(1, round(len(train) * corpus.eval_fraction)), len(train))
    return RowSource(train=RowSlice(train, 0, boundary), evaluation=RowSlice(train, boundary, len(train)))


def input_files(corpus: Corpus, data: Data) -> dict[str, list[Path]]:
    """The index files and the shards that they list."""
    found = named_files(corpus, data, (".json",))
    for paths in found.values():
        del paths[1:]
        index = json.loads(paths[0].read_text(encoding="utf-8"))
        entries = index.get("files", []) if isinstance(index, dict) else []
        shards = [_local_path(str(entry["path"]), paths[0], corpus) for entry in entries if "path" in entry]
        paths += [path for path in shards if path.is_file()]
    return found


def _read_index(names: str, corpus: Corpus, data: Data, spec: RowSpec) -> "TokenShards":
    (path,) = find_files(names, data.cache, endings=(".json",))[:1]
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, length, dtype = index["format_version"], int(index["sequence_length"]), np.dtype(index["dtype"])
        entries = [(str(entry["path"]), int(entry["n_tokens"])) for entry in index["files"]]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"is not an index of token shards: {type(error).__name__} {error}"
        raise ConfigError(Problem("data.path", reason, value=path)) from None
    if version != VERSION:
        raise ConfigError(
            Problem("data.path", f"has the unsupported format version {version}", value=path, accepted=VERSION)
        )
    if length != spec.seq_len:
        reason = f"is not the sequence length of the index {path}"
        raise ConfigError(Problem("train.seq_len", reason, value=spec.seq_len, accepted=str(length)))
    shards = [_open_shard(_local_path(name, path, corpus), tokens, dtype) for name, tokens in entries]
    return TokenShards(shards, spec, repetition_filter=corpus.repetition_filter)


def _local_path(name: str, index: Path, corpus: Corpus) -> Path:
    """Local path of a file of the index; relative paths start at the index."""
    if corpus.remap_from is not None and corpus.remap_to is not None and name.startswith(corpus.remap_from):
        name = corpus.remap_to + name.removeprefix(corpus.remap_from)
    if "://" in name:
        hint = "mount its bucket and set data.remap_from and data.remap_to"
        raise ConfigError(Problem("data.path", f"lists {name}, which is not a local file", value=index, hint=hint))
    return index.parent / name


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of tokens: offset of the first token, and their number."""

    path: Path
    offset: int
    tokens: int
    dtype: np.dtype

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))


def _open_shard(path: Path, tokens: int, dtype: np.dtype) -> Shard:
    try:
        with path.open("rb") as file:
            offset = 0
            if file.read(len(MAGIC)) == MAGIC:
                file.seek(0)
                offset, dtype = _read_npy_header(file)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("data.path", f"a file of the index cannot be read: {error}", value=path)) from None
    available = (path.stat().st_size - offset) // dtype.itemsize
    if available < tokens:
        reason = f"has {available} tokens, but the index says {tokens}: it is truncated, or has another dtype"
        raise ConfigError(Problem("data.path", reason, value=path))
    return Shard(path, offset, tokens, dtype)


def _read_npy_header(file: Any) -> tuple[int, np.dtype]:
    major, _ = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    _, _, dtype = read(file)
    return file.tell(), dtype


class TokenShards:
    """Rows of all files, by index."""

    def __init__(self, shards: Sequence[Shard], spec: RowSpec, *, repetition_filter: bool):
        self._shards, self._spec, self._repetition_filter = shards, spec, repetition_filter
        self._ends = np.cumsum([shard.tokens // spec.seq_len for shard in shards])
        self._open: LruCache[np.ndarray] = LruCache(HANDLES)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Row:
        seq_len = self._spec.seq_len
        number = int(np.searchsorted(self._ends, index, "right"))
        shard = self._shards[number]
        start = (index - (int(self._ends[number - 1]) if number else 0)) * seq_len
        tokens = self._open.get(number, shard.open)[start : start + seq_len]
        if (highest := int(tokens.max())) >= self._spec.vocab_size:
            reason = f"is too small: {shard.path} has token id {highest}"
            raise ConfigError(Problem("model.vocab_size", reason, value=self._spec.vocab_size))
        row = make_row(tokens, seq_len)
        if self._repetition_filter and is_repetitive(tokens):
            row["weights"][:] = 0
        return row


@dataclasses.dataclass(frozen=True)
class RowSlice:
    """A consecutive slice of other rows."""

    rows: Rows
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> Row:
        return self.rows[self.first + index]


def is_repetitive(tokens: np.ndarray) -> bool:
    """True if a few tokens repeat too often. If period p holds at r successive positions, r + p tokens repeat it."""
    periods = range(1, min(LONGEST_PERIOD, len(tokens) // MIN_REPEATS) + 1)
    return any((_longest_run(tokens, period) + period) // period >= MIN_REPEATS for period in periods)


def _longest_run(tokens: np.ndarray, period: int) -> int:
    """Length of the longest run of tokens that equal the token one period earlier."""
    breaks = np.flatnonzero(tokens[period:] != tokens[:-period])
    edges = np.concatenate([[-1], breaks, [len(tokens) - period]])
    return int(np.diff(edges).max()) - 1
