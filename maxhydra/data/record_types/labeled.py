"""Completions with a label, true for a desirable one: the unpaired data of KTO.

prompt and completion are text or messages, as in preference pairs. A row has the columns of the completion, prefixed
with `chosen_`, and `label`, 1 or 0. `with_mismatched` adds the completion of another prompt, prefixed with `rejected_`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.schema.data import Corpus, Data, Overlong
from maxhydra.data.record_types import Rejected, column_of, text_of
from maxhydra.data.record_types._unpacked import UnpackedRecordType
from maxhydra.data.record_types.preference import (
    as_messages,
    document_of,
    has_loss,
    padded_columns,
    prompt_length,
    role,
)
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row
from maxhydra.data.tokenizers import load_tokenizer

COLUMNS = ("tokens", "targets", "positions", "weights")


class Labeled(NamedTuple):
    completion: Document
    label: bool


class LabeledCompletions(UnpackedRecordType):
    def _example(self, record: Record) -> Any:
        values = [column_of(record, self.corpus, name) for name in ("prompt", "completion", "label")]
        if rejection := next((value for value in values if isinstance(value, Rejected)), None):
            return rejection
        prompt, completion, label = values
        if label not in (True, False):
            return Rejected(f"has the label {label!r}, expected true or false")
        is_chat = any(not isinstance(value, (str, bytes)) for value in (prompt, completion))
        document = self._from_messages(prompt, completion) if is_chat else self._from_texts(prompt, completion)
        if isinstance(document, Rejected):
            return document
        if document.num_targets > self.seq_len:
            if self.data.packing.overlong is not Overlong.truncate:
                reason = f"has {len(document.tokens)} tokens, more than train.seq_len={self.seq_len}"
                return Rejected(f"{reason}; set data.packing.overlong=truncate to truncate")
            cut = max(0, min(document.num_targets - self.seq_len, prompt_length(document) - 1))
            window = slice(cut, cut + self.seq_len + 1)
            assert document.weights is not None
            document = Document(document.tokens[window], document.weights[window])
        return Labeled(document, bool(label)) if has_loss(document) else Rejected("the completion is empty")

    def _from_messages(self, prompt: Any, completion: Any) -> Any:
        context, messages = as_messages(prompt, "user"), as_messages(completion, "assistant")
        if not context or not messages or role(messages[-1]) != "assistant":
            return Rejected("expected a prompt, and a completion that ends with a message of the assistant")
        limit = self.data.max_characters
        return self._template.encode([*context, *messages], known=len(context), max_characters=limit)

    def _from_texts(self, prompt: Any, completion: Any) -> Any:
        texts = [text_of(value, self.data) for value in (prompt, completion)]
        if rejection := next((text for text in texts if isinstance(text, Rejected)), None):
            return rejection
        settings, tokenizer = self.data.tokenizer, self.tokenizer
        begin = [tokenizer.bos] if settings.add_bos and tokenizer.bos is not None else []
        end = [tokenizer.eos] if settings.add_eos and tokenizer.eos is not None else []
        prompt_ids, ids = (array.tolist() for array in tokenizer.encode_batch(texts))
        return document_of([*begin, *prompt_ids, *ids, *end], len(begin) + len(prompt_ids))

    def row(self, example: Any, seq_len: int) -> Row:
        columns = padded_columns(example.completion, seq_len)
        label = np.array(example.label, np.float32)
        return {**{f"chosen_{name}": columns[name] for name in COLUMNS}, "label": label}


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


def build(corpus: Corpus, data: Data, seq_len: int) -> LabeledCompletions:
    return LabeledCompletions(corpus, data, load_tokenizer(data), seq_len)
