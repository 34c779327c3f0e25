"""What shapes share whose examples have a row each, of text or of conversations."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.chat import ChatTemplate, chat_template
from maxhydra.data.records import Record
from maxhydra.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class UnpackedRecordType(ABC):
    """A shape that makes its examples one by one, and does not pack them."""

    corpus: Corpus
    data: Data
    tokenizer: Tokenizer
    seq_len: int
    packs = False

    @cached_property
    def _template(self) -> ChatTemplate:
        """Asked for at the first conversation, since plain text needs none."""
        return chat_template(self.tokenizer)

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._example(record) for record in records]

    @abstractmethod
    def _example(self, record: Record) -> Any:
        """An example or a Refused."""
