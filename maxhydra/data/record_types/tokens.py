"""Documents that were tokenized before, as task=tokenize writes them.

Every token is learned, unless a record has weights too, as those made of conversations do.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.document import Document
from maxhydra.data.record_types import Rejected, column_of, ids_of, weights_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Row


@dataclasses.dataclass(frozen=True)
class Tokens:
    corpus: Corpus
    packs = True

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._example(column_of(record, self.corpus, "tokens"), record.get("weights")) for record in records]

    def _example(self, value: Any, weights: Any) -> Document | Rejected:
        tokens = ids_of(value)
        if isinstance(tokens, Rejected):
            return tokens
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            return Rejected(f"not a list of token ids but {tokens.dtype} of shape {tokens.shape}")
        learned = weights_of(weights, len(tokens))
        return learned if isinstance(learned, Rejected) else Document(tokens, learned)

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("tokens are packed")


def build(corpus: Corpus, data: Data, seq_len: int) -> Tokens:
    return Tokens(corpus)
