"""Conversations: a list of {role, content} messages, with loss on the assistant's turns and their end tokens.

The template writes begin and end tokens, so data.tokenizer.add_bos and add_eos are ignored.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.chat import ChatTemplate, compile_chat_template
from maxhydra.data.record_types import Rejected, column_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Row
from maxhydra.data.tokenizers import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Chat:
    corpus: Corpus
    data: Data
    template: ChatTemplate
    packs = True

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._example(column_of(record, self.corpus, "messages")) for record in records]

    def _example(self, messages: Any) -> Any:
        if isinstance(messages, Rejected):
            return messages
        return self.template.encode(messages, max_characters=self.data.max_characters)

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("conversations are packed; use pack_rows")


def build(corpus: Corpus, data: Data, seq_len: int) -> Chat:
    return Chat(corpus, data, compile_chat_template(load_tokenizer(data)))
