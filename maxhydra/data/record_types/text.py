"""Plain text with loss on every token."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.record_types import Rejected, column_of, text_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row
from maxhydra.data.tokenizers import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True)
class Text:
    corpus: Corpus
    data: Data
    tokenizer: Tokenizer
    packs = True

    def encode(self, records: Sequence[Record]) -> list[Any]:
        texts = [text_of(column_of(record, self.corpus, "text"), self.data) for record in records]
        ids = iter(self.tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
        prefix = [self.tokenizer.bos] if self.data.tokenizer.add_bos and self.tokenizer.bos is not None else []
        suffix = [self.tokenizer.eos] if self.data.tokenizer.add_eos and self.tokenizer.eos is not None else []

        def document(text: str, tokens: np.ndarray) -> Document:
            whole = np.empty(len(prefix) + len(tokens) + len(suffix), np.int32)
            whole[: len(prefix)] = prefix
            whole[len(prefix) : len(prefix) + len(tokens)] = tokens
            whole[len(prefix) + len(tokens) :] = suffix
            return Document(whole, text_bytes=len(text.encode()))

        return [text if isinstance(text, Rejected) else document(text, next(ids)) for text in texts]

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("text is packed; use pack_rows")


def build(corpus: Corpus, data: Data, seq_len: int) -> Text:
    return Text(corpus, data, load_tokenizer(data))
