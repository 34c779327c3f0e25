"""Documents that were tokenized before, as task=tokenize writes them.

Every token is learned, unless a record has weights too, as those made of conversations do.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxhydra.config.corpus import Corpus
from maxhydra.config.data import Data
from maxhydra.data.document import Document
from maxhydra.data.records import Record
from maxhydra.data.rows import Row
from maxhydra.data.shapes import Refused, column_of


@dataclasses.dataclass(frozen=True)
class Tokens:
    corpus: Corpus
    packs = True

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._example(column_of(record, self.corpus, "tokens"), record.get("weights")) for record in records]

    def _example(self, value: Any, weights: Any) -> Document | Refused:
        if isinstance(value, Refused):
            return value
        tokens = np.asarray(value)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            return Refused(f"not a list of token ids but {tokens.dtype} of shape {tokens.shape}")
        if weights is None:
            return Document(tokens)
        if np.shape(weights) != tokens.shape:
            return Refused(f"weights of shape {np.shape(weights)} for {len(tokens)} tokens")
        return Document(tokens, np.asarray(weights, np.float32))

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("tokens are packed")


def build(corpus: Corpus, data: Data, seq_len: int) -> Tokens:
    return Tokens(corpus)
