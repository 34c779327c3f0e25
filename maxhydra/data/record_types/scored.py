"""Scored completions: a prompt, a completion of it, and the score that a reward model should give.

prompt and completion are text or messages. A row has the columns of one sequence, with loss on the completion, and
`score`.
"""

from typing import Any

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.record_types._completion import CompletionRecordType
from maxhydra.data.record_types.preference import number_of, padded_columns
from maxhydra.data.rows import Document, Row
from maxhydra.data.tokenizers import load_tokenizer


class Scored(CompletionRecordType):
    value_column = "score"

    def _value(self, column: Any) -> Any:
        return number_of(column, "score")

    def _truncated_start(self, document: Document) -> int:
        # The score is read at the last token, so truncation drops the start.
        return document.num_targets - self.seq_len

    def row(self, example: Any, seq_len: int) -> Row:
        return {**padded_columns(example.document, seq_len), "score": np.array(example.value, np.float32)}


def build(corpus: Corpus, data: Data, seq_len: int) -> Scored:
    return Scored(corpus, data, load_tokenizer(data), seq_len)
