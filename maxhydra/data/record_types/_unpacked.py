"""Base class of record types whose examples each fill a row."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.chat import ChatTemplate, compile_chat_template
from maxhydra.data.records import Record
from maxhydra.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class UnpackedRecordType(ABC):
    """A record type that converts records one by one and does not pack them."""

    corpus: Corpus
    data: Data
    tokenizer: Tokenizer
    seq_len: int
    packs = False

    @cached_property
    def _template(self) -> ChatTemplate:
        """Chat template, compiled with the first conversation: plain text needs none."""
        return compile_chat_template(self.tokenizer)

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._example(record) for record in records]

    @abstractmethod
    def _example(self, record: Record) -> Any:
        """Convert one record into an example or a Rejected."""
