"""The texts of a data config, without a tokenizer: what a new tokenizer is trained on."""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.corpus import READY_ROWS, ROLES, Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.pipeline import TRAIN, Pipeline
from maxhydra.data.record_types import Rejected, column_of, text_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Row, RowSpec
from maxhydra.data.special_tokens import blocks

# Sources whose files are text, and the characters of such a file that are given out together.
FILES = ("demo", "text")
PART = 20_000

# Columns that must be there, of the shapes that have text.
NEEDED = {"text": ("text",), "chat": ("messages",), "preference": ("chosen", "rejected"), "prompts": ("prompt",)}


def texts(data: Data, *, seed: int) -> Iterator[str]:
    """The texts to train on, once, in the order of data.shuffle; what is held out is not among them.

    Of a mixture, each source has its share of the characters (data.weights, or the same for all) until it ends.
    """
    corpora = dict(data.sources) if data.source == "mixture" else {"": data}
    readers = {name: _texts(corpus, data, name=name, seed=seed) for name, corpus in corpora.items()}
    given = dict.fromkeys(readers, 0.0)
    while readers:
        name = min(readers, key=given.__getitem__)
        text = next(readers[name], None)
        if text is None:
            readers.pop(name)
        else:
            given[name] += len(text) / data.weights.get(name, 1.0)
            yield text


def _texts(corpus: Corpus, data: Data, *, name: str, seed: int) -> Iterator[str]:
    where = f"data.sources.{name}" if name else "data"
    has_text = corpus.source in FILES or (corpus.source not in READY_ROWS and corpus.record_type in NEEDED)
    if not has_text:
        field, value = ("source", corpus.source) if corpus.source in READY_ROWS else ("record_type", corpus.record_type)
        raise ConfigError(Problem(f"{where}.{field}", "holds tokens, and no text", value=value))
    if corpus.source in FILES:
        found = importlib.import_module(f"maxhydra.data.sources.{corpus.source}").files(corpus, data)
        yield from _of_files(found, 0.0 if corpus.eval_path else corpus.eval_fraction)
    else:
        yield from _of_records(corpus, data, seed)


def _of_files(paths: Sequence[Path], held_out: float) -> Iterator[str]:
    """Files in order, but for a share of all bytes at the end."""
    left = round(sum(path.stat().st_size for path in paths) * (1 - held_out))
    for path in paths:
        content = path.read_bytes()[:left]
        left -= len(content)
        # A file that is cut may end within a character.
        yield from blocks(content.decode(errors="ignore" if not left else "strict"), PART)


@dataclasses.dataclass(frozen=True)
class _Strings:
    """Every text in the columns of a shape."""

    corpus: Corpus
    data: Data
    packs = False

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._example(record) for record in records]

    def _example(self, record: Record) -> Any:
        needed = NEEDED[self.corpus.record_type]
        columns = [column_of(record, self.corpus, role) for role in needed]
        others = [
            record.get(self.corpus.columns.get(role, role))
            for role in ROLES[self.corpus.record_type]
            if role not in needed
        ]
        found = [text_of(text, self.data) for column in columns for text in _strings(column)]
        found += [text for column in others for text in _strings(column) if isinstance(text, str)]
        return next((text for text in (*columns, *found) if isinstance(text, Rejected)), "\n".join(map(str, found)))

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("texts make no rows")


def _strings(value: Any) -> list[Any]:
    """The texts in a value: itself, or what messages say."""
    if isinstance(value, Mapping):
        return _strings(value.get("content"))
    if isinstance(value, (list, tuple)):
        return [text for part in value for text in _strings(part)]
    return [] if value is None else [value]


def _of_records(corpus: Corpus, data: Data, seed: int) -> Iterator[str]:
    fields = {field.name: getattr(corpus, field.name) for field in dataclasses.fields(Corpus)}
    # Opened as plain text: the shape's own reading would ask for a chat template, which is not needed here.
    opened = fields | {"sources": {}, "weights": {}, "record_type": "text", "columns": {}}
    pipeline = Pipeline(dataclasses.replace(data, **opened), RowSpec(seq_len=1, vocab_size=2**31, seed=seed))
    encoder = dataclasses.replace(pipeline.encoder("", TRAIN), shape=_Strings(corpus, data))
    for chunk in pipeline.chunks("", TRAIN, share=(0, 1), shuffle=data.shuffle).follow(None, 1):
        encoded = encoder(chunk.payload)
        for fault in encoded.faults:
            pipeline.on_fault(fault)
        yield from encoded.examples
