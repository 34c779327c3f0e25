"""The raw texts of a data config, without tokenization: the training data of a new tokenizer."""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import READY_ROWS, ROLES, Corpus, Data
from maxhydra.data.pipeline import TRAIN, Pipeline
from maxhydra.data.record_types import Rejected, column_of, text_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Row, RowSpec
from maxhydra.data.tokenizers import blocks

# Sources that read plain text files, and the number of characters per text that is taken from one.
FILES = ("demo", "text")
TEXT_SIZE = 20_000

# Required columns of the record types that have text.
REQUIRED_COLUMNS = {
    "text": ("text",),
    "chat": ("messages",),
    "preference": ("chosen", "rejected"),
    "labeled": ("prompt", "completion"),
    "prompts": ("prompt",),
}


def texts(data: Data, *, seed: int) -> Iterator[str]:
    """Iterate once over the training texts, in the order of data.shuffle; held-out texts are excluded.

    In a mixture, each source contributes its share of the characters (data.weights, or equal shares) until it ends.
    """
    corpora = dict(data.sources) if data.source == "mixture" else {"": data}
    readers = {name: _texts(corpus, data, name=name, seed=seed) for name, corpus in corpora.items()}
    weighted_characters = dict.fromkeys(readers, 0.0)
    while readers:
        name = min(readers, key=weighted_characters.__getitem__)
        text = next(readers[name], None)
        if text is None:
            readers.pop(name)
        else:
            weighted_characters[name] += len(text) / data.weights.get(name, 1.0)
            yield text


def _texts(corpus: Corpus, data: Data, *, name: str, seed: int) -> Iterator[str]:
    section = f"data.sources.{name}" if name else "data"
    has_text = corpus.source in FILES or (corpus.source not in READY_ROWS and corpus.record_type in REQUIRED_COLUMNS)
    if not has_text:
        field, value = ("source", corpus.source) if corpus.source in READY_ROWS else ("record_type", corpus.record_type)
        raise ConfigError(Problem(f"{section}.{field}", "has tokens, not text", value=value))
    if corpus.source in FILES:
        paths = importlib.import_module(f"maxhydra.data.sources.{corpus.source}").files(corpus, data)
        yield from _file_texts(paths, 0.0 if corpus.eval_path else corpus.eval_fraction)
    else:
        yield from _record_texts(corpus, data, seed)


def _file_texts(paths: Sequence[Path], held_out: float) -> Iterator[str]:
    """Texts of files in order, without the held-out share of all bytes at the end."""
    remaining = round(sum(path.stat().st_size for path in paths) * (1 - held_out))
    for path in paths:
        content = path.read_bytes()[:remaining]
        remaining -= len(content)
        # A truncated file may end in the middle of a character.
        yield from blocks(content.decode(errors="ignore" if not remaining else "strict"), TEXT_SIZE)


@dataclasses.dataclass(frozen=True)
class _TextColumns:
    """Record type that extracts all text columns of another record type as one string."""

    corpus: Corpus
    data: Data
    packs = False

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._example(record) for record in records]

    def _example(self, record: Record) -> Any:
        required = REQUIRED_COLUMNS[self.corpus.record_type]
        columns = [column_of(record, self.corpus, role) for role in required]
        optional = [
            record.get(self.corpus.columns.get(role, role))
            for role in ROLES[self.corpus.record_type]
            if role not in required
        ]
        texts = [text_of(text, self.data) for column in columns for text in _strings(column)]
        texts += [text for column in optional for text in _strings(column) if isinstance(text, str)]
        return next((text for text in (*columns, *texts) if isinstance(text, Rejected)), "\n".join(map(str, texts)))

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("raw texts cannot be made into rows")


def _strings(value: Any) -> list[Any]:
    """All strings in a value: the value itself, the items of a list, or the content of messages."""
    if isinstance(value, Mapping):
        return _strings(value.get("content"))
    if isinstance(value, (list, tuple)):
        return [text for part in value for text in _strings(part)]
    return [] if value is None else [value]


def _record_texts(corpus: Corpus, data: Data, seed: int) -> Iterator[str]:
    fields = {field.name: getattr(corpus, field.name) for field in dataclasses.fields(Corpus)}
    # Opened as plain text: the real record type would require a chat template, which is not required here.
    opened = fields | {"sources": {}, "weights": {}, "record_type": "text", "columns": {}}
    pipeline = Pipeline(dataclasses.replace(data, **opened), RowSpec(seq_len=1, vocab_size=2**31, seed=seed))
    encoder = dataclasses.replace(pipeline.encoder("", TRAIN), record_type=_TextColumns(corpus, data))
    for chunk in pipeline.chunks("", TRAIN, share=(0, 1), shuffle=data.shuffle).iter_from(None, 1):
        encoded = encoder(chunk.payload)
        for bad_record in encoded.bad_records:
            pipeline.on_bad_record(bad_record)
        yield from encoded.examples
