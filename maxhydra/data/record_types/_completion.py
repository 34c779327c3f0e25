"""A prompt, one completion of it and a value, as text or messages: the records of KTO and of reward regression."""

import abc
from typing import Any, NamedTuple

from maxhydra.data.record_types import Rejected, column_of, first_rejection, text_of
from maxhydra.data.record_types._unpacked import UnpackedRecordType
from maxhydra.data.record_types.preference import (
    as_messages,
    document_of,
    fit_document,
    has_loss,
    prompt_length,
    role,
)
from maxhydra.data.records import Record
from maxhydra.data.rows import Document


class Completion(NamedTuple):
    document: Document
    value: float


class CompletionRecordType(UnpackedRecordType):
    """Encodes prompt and completion, with loss on the completion. Subclasses read the value and build the row."""

    value_column: str

    @abc.abstractmethod
    def _value(self, column: Any) -> Any:
        """Return the value of a record as a number, or a Rejected."""

    def _example(self, record: Record) -> Any:
        prompt, completion, column = (
            column_of(record, self.corpus, name) for name in ("prompt", "completion", self.value_column)
        )
        value: Any = column if isinstance(column, Rejected) else self._value(column)
        if rejection := first_rejection((prompt, completion, value)):
            return rejection
        is_chat = any(not isinstance(part, (str, bytes)) for part in (prompt, completion))
        document = self._encode_messages(prompt, completion) if is_chat else self._encode_texts(prompt, completion)
        if not isinstance(document, Rejected):
            document = fit_document(document, self.data, self.seq_len, start=self._truncated_start)
        if isinstance(document, Rejected):
            return document
        return Completion(document, value) if has_loss(document) else Rejected("the completion is empty")

    def _truncated_start(self, document: Document) -> int:
        """Return the first token to keep: as much of the prompt as fits, at least one token, then the completion."""
        return max(0, min(document.num_targets - self.seq_len, prompt_length(document) - 1))

    def _encode_messages(self, prompt: Any, completion: Any) -> Any:
        context, messages = as_messages(prompt, "user"), as_messages(completion, "assistant")
        if not context or not messages or role(messages[-1]) != "assistant":
            return Rejected("expected a prompt, and a completion that ends with a message of the assistant")
        limit = self.data.max_characters
        return self._template.encode([*context, *messages], known=len(context), max_characters=limit)

    def _encode_texts(self, prompt: Any, completion: Any) -> Any:
        texts = [text_of(value, self.data) for value in (prompt, completion)]
        if rejection := first_rejection(texts):
            return rejection
        settings, tokenizer = self.data.tokenizer, self.tokenizer
        begin = [tokenizer.bos] if settings.add_bos and tokenizer.bos is not None else []
        end = [tokenizer.eos] if settings.add_eos and tokenizer.eos is not None else []
        prompt_ids, ids = (array.tolist() for array in tokenizer.encode_batch(texts))
        tokens = [*begin, *prompt_ids, *ids, *end]
        return document_of(tokens, len(begin) + len(prompt_ids) if ids else len(tokens))
