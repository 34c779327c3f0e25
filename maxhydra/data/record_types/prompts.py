"""Prompts for a model to complete, with reference answers: for reinforcement learning and evaluation.

A row has `tokens`, the prompt padded to seq_len; `length`, the number of prompt tokens; and `info`, which stays on the
host: {"prompt": its text, "messages": the prompt as a conversation, "answer": any value or None, "record": the other
columns}.
"""

import dataclasses
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.chat import ChatTemplateError
from maxhydra.data.record_types import Rejected, column_of, text_of
from maxhydra.data.record_types._unpacked import UnpackedRecordType
from maxhydra.data.records import Record
from maxhydra.data.rows import Row
from maxhydra.data.tokenizers import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Prompt:
    tokens: np.ndarray
    info: dict[str, Any]


class Prompts(UnpackedRecordType):
    def _example(self, record: Record) -> Any:
        value = column_of(record, self.corpus, "prompt")
        is_text = isinstance(value, (str, bytes))
        try:
            text = value if is_text or isinstance(value, Rejected) else self._template.prompt(value)
        except ChatTemplateError as error:
            return Rejected(str(error))
        text = text_of(text, self.data)
        if isinstance(text, Rejected):
            return text
        begin = (
            [self.tokenizer.bos] if is_text and self.data.tokenizer.add_bos and self.tokenizer.bos is not None else []
        )
        ids = self.tokenizer.encode(text) if is_text else self.tokenizer.encode_with_special_tokens(text)[0].tolist()
        tokens = np.array([*begin, *ids], np.int32)
        if not 0 < len(tokens) <= self.seq_len:
            reason = f"has {len(tokens)} tokens, more than train.seq_len={self.seq_len}" if len(tokens) else "is empty"
            return Rejected(f"the prompt {reason}")
        names = {role: self.corpus.columns.get(role, role) for role in ("prompt", "answer")}
        rest = {name: column for name, column in record.items() if name not in names.values()}
        messages = [{"role": "user", "content": text}] if is_text else value
        info = {"prompt": text, "messages": messages, "answer": record.get(names["answer"]), "record": rest}
        return Prompt(tokens, info)

    def row(self, example: Any, seq_len: int) -> Row:
        tokens = np.full(seq_len, self.tokenizer.pad, np.int32)
        tokens[: len(example.tokens)] = example.tokens
        info = np.empty((), object)
        info[()] = example.info
        return {"tokens": tokens, "length": np.array(len(example.tokens), np.int32), "info": info}


def build(corpus: Corpus, data: Data, seq_len: int) -> Prompts:
    return Prompts(corpus, data, load_tokenizer(data), seq_len)
