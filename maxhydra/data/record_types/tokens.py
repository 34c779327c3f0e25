"""Documents that are already tokenized, as task=tokenize writes them.

The loss covers every token, unless records have weights, as those made from conversations do.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.record_types import Rejected, column_of, ids_of, weights_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row


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
            return Rejected(f"expected a list of token ids, found {tokens.dtype} of shape {tokens.shape}")
        loss_weights = weights_of(weights, len(tokens))
        return loss_weights if isinstance(loss_weights, Rejected) else Document(tokens, loss_weights)

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("tokens are packed; use pack_rows")


def build(corpus: Corpus, data: Data, seq_len: int) -> Tokens:
    return Tokens(corpus)
