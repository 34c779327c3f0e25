"""Scored completions: a prompt, a completion of it, and the score that a reward model should give.

prompt and completion are text or messages. A row has the columns of one sequence, with loss on the completion, and
`score`.
"""

import dataclasses
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Corpus, Data, Overlong
from maxhydra.data.record_types import Rejected, column_of, text_of
from maxhydra.data.record_types._unpacked import UnpackedRecordType
from maxhydra.data.record_types.preference import number_of, padded_columns
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row
from maxhydra.data.tokenizers import load_tokenizer


@dataclasses.dataclass(frozen=True)
class ScoredCompletion:
    document: Document
    score: float


class Scored(UnpackedRecordType):
    def _example(self, record: Record) -> Any:
        values = [column_of(record, self.corpus, name) for name in ("prompt", "completion")]
        score = number_of(column_of(record, self.corpus, "score"), "score")
        if rejection := next((value for value in (*values, score) if isinstance(value, Rejected)), None):
            return rejection
        is_chat = any(not isinstance(value, (str, bytes)) for value in values)
        document = self._encode_messages(*values) if is_chat else self._encode_texts(*values)
        if isinstance(document, Rejected):
            return document
        cut = max(0, document.num_targets - self.seq_len)
        if cut and self.data.packing.overlong is not Overlong.truncate:
            reason = f"has {len(document.tokens)} tokens, more than train.seq_len={self.seq_len}"
            return Rejected(f"{reason}; set data.packing.overlong=truncate to drop the start of the prompt")
        assert document.weights is not None
        tokens, weights = document.tokens[cut:], document.weights[cut:]
        if not weights[1:].any():
            return Rejected("the completion is empty")
        return ScoredCompletion(Document(tokens, weights), score)

    def _encode_messages(self, prompt: Any, completion: Any) -> Any:
        context, reply = (
            list(value) if isinstance(value, (list, tuple)) else [{"role": role, "content": value}]
            for value, role in ((prompt, "user"), (completion, "assistant"))
        )
        messages = [*context, *reply]
        return self._template.encode(messages, known=len(context), max_characters=self.data.max_characters)

    def _encode_texts(self, prompt: Any, completion: Any) -> Any:
        texts = [text_of(value, self.data) for value in (prompt, completion)]
        if rejection := next((text for text in texts if isinstance(text, Rejected)), None):
            return rejection
        settings, tokenizer = self.data.tokenizer, self.tokenizer
        begin = [tokenizer.bos] if settings.add_bos and tokenizer.bos is not None else []
        end = [tokenizer.eos] if settings.add_eos and tokenizer.eos is not None else []
        prompt_ids, ids = (ids.tolist() for ids in tokenizer.encode_batch(texts))
        tokens = [*begin, *prompt_ids, *ids, *end]
        known = len(begin) + len(prompt_ids) if ids else len(tokens)
        return Document(np.array(tokens, np.int32), (np.arange(len(tokens)) >= known).astype(np.float32))

    def row(self, example: Any, seq_len: int) -> Row:
        return {**padded_columns(example.document, seq_len), "score": np.array(example.score, np.float32)}


def build(corpus: Corpus, data: Data, seq_len: int) -> Scored:
    return Scored(corpus, data, load_tokenizer(data), seq_len)
