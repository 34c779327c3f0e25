"""Completions with a label, true for a desirable one: the unpaired data of KTO.

prompt and completion are text or messages, as in preference pairs. A row has the columns of the completion, prefixed
with `chosen_`, and `label`, 1 or 0. `with_mismatched` adds the completion of another prompt, prefixed with `rejected_`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.record_types import Rejected
from maxhydra.data.record_types._completion import CompletionRecordType
from maxhydra.data.record_types.preference import padded_columns
from maxhydra.data.rows import Document, Row
from maxhydra.data.tokenizers import load_tokenizer

COLUMNS = ("tokens", "targets", "positions", "weights")


class Labeled(CompletionRecordType):
    value_column = "label"

    def _value(self, column: Any) -> Any:
        return (
            float(column) if column in (True, False) else Rejected(f"has the label {column!r}, expected true or false")
        )

    def row(self, example: Any, seq_len: int) -> Row:
        columns = padded_columns(example.document, seq_len)
        return {**{f"chosen_{name}": columns[name] for name in COLUMNS}, "label": np.array(example.value, np.float32)}


def with_mismatched(rows: Sequence[Row]) -> list[Row]:
    """Rows that also have their prompt with the completion of the row before, the first with that of the last.

    KTO estimates from them how far the model is from its reference. Padding rows of an evaluation stay empty.
    """
    filled = [index for index, row in enumerate(rows) if row["chosen_weights"].any()]
    before = dict(zip(filled, [filled[-1], *filled[:-1]] if filled else [], strict=True))
    return [{**row, **_mismatched(row, rows[before.get(index, index)])} for index, row in enumerate(rows)]


def _mismatched(row: Row, other: Row) -> Row:
    seq_len = len(row["chosen_tokens"])
    if not row["chosen_weights"].any():
        return {f"rejected_{name}": row[f"chosen_{name}"] for name in COLUMNS}
    start, other_start = (int(np.argmax(columns["chosen_weights"] > 0)) for columns in (row, other))
    end = int(np.flatnonzero(other["chosen_weights"])[-1]) + 1
    prompt, ids = row["chosen_tokens"][: start + 1], other["chosen_targets"][other_start:end]
    weights = [np.zeros(start + 1, np.float32), other["chosen_weights"][other_start:end]]
    document = Document(np.concatenate([prompt, ids])[: seq_len + 1], np.concatenate(weights)[: seq_len + 1])
    return {f"rejected_{name}": column for name, column in padded_columns(document, seq_len).items()}


def build(corpus: Corpus, data: Data, seq_len: int) -> Labeled:
    return Labeled(corpus, data, load_tokenizer(data), seq_len)
