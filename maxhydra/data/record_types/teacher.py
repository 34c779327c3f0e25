"""Documents with a teacher's top-k logits: the k most likely tokens after each token but the last.

The loss covers every token, unless records have weights, as those made from conversations do.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.record_types import Rejected, array_of, column_of, ids_of, weights_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row

COLUMNS = ("tokens", "teacher_ids", "teacher_logits")


@dataclasses.dataclass(frozen=True)
class Teacher:
    corpus: Corpus
    packs = True

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [
            self._example({name: column_of(record, self.corpus, name) for name in COLUMNS}, record.get("weights"))
            for record in records
        ]

    def _example(self, columns: dict[str, Any], weights: Any) -> Document | Rejected:
        arrays = [array_of(value) if name == "teacher_logits" else ids_of(value) for name, value in columns.items()]
        for array in arrays:
            if isinstance(array, Rejected):
                return array
        tokens, ids, logits = arrays
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            return Rejected(f"tokens: expected a list of ids, found {tokens.dtype} of shape {tokens.shape}")
        if len(tokens) < 2:
            return Rejected(f"has {len(tokens)} tokens; at least 2 are needed")
        if ids.ndim != 2 or ids.shape != logits.shape or len(ids) != len(tokens) - 1:
            shapes = f"teacher_ids of shape {ids.shape} and teacher_logits of shape {logits.shape}"
            return Rejected(f"has {len(tokens)} tokens with {shapes}: both must be [{len(tokens) - 1}, k]")
        if ids.dtype.kind not in "iu" or logits.dtype.kind not in "iuf":
            return Rejected(
                f"teacher_ids are {ids.dtype} and teacher_logits {logits.dtype}: expected integers and numbers"
            )
        dtype = np.float16 if logits.dtype == np.float16 else np.float32
        logits = logits.astype(dtype)
        if not np.isfinite(logits).all():
            return Rejected("teacher_logits are not all finite")
        loss_weights = weights_of(weights, len(tokens))
        if isinstance(loss_weights, Rejected):
            return loss_weights
        return Document(tokens, loss_weights, {"teacher_ids": ids.astype(np.int32), "teacher_logits": logits})

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("documents of a teacher are packed; use pack_rows")


def build(corpus: Corpus, data: Data, seq_len: int) -> Teacher:
    return Teacher(corpus)
