"""Preference pairs: what was chosen and what was rejected after the same prompt, which is not learned.

chosen and rejected are text or messages. The prompt is a column of its own, text or messages, or else what both begin
with: the same messages, or the same tokens. Messages may begin with the prompt even where it has a column of its own.
Texts are tokenized apart from their prompt, as they are when a model is asked; messages are rendered as one
conversation.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data, Overlong
from maxhydra.data.document import Document
from maxhydra.data.record_types import Rejected, column_of, text_of
from maxhydra.data.record_types._rows import UnpackedRecordType
from maxhydra.data.records import Record
from maxhydra.data.rows import Row
from maxhydra.data.tokenizers import load_tokenizer

SIDES = ("chosen", "rejected")
EXPECTED = (
    "expected: chosen and rejected, text or messages that end with the assistant's, and prompt unless both hold it"
)


@dataclasses.dataclass(frozen=True)
class Pair:
    chosen: Document
    rejected: Document


class Preference(UnpackedRecordType):
    def _example(self, record: Record) -> Any:
        prompt = record.get(self.corpus.columns.get("prompt", "prompt"))
        sides = [column_of(record, self.corpus, side) for side in SIDES]
        if rejection := _first_rejection(sides):
            return Rejected(f"{rejection.reason}; {EXPECTED}")
        if any(isinstance(value, np.ndarray) for value in (prompt, *sides)):
            return Rejected(f"numbers, which no template and no tokenizer reads; {EXPECTED}")
        is_chat = any(not isinstance(value, (str, bytes)) for value in (prompt, *sides) if value is not None)
        documents = self._conversations(prompt, sides) if is_chat else self._texts(prompt, sides)
        if rejection := _first_rejection(documents):
            return rejection
        if missing := [side for side, document in zip(SIDES, documents, strict=True) if not _learned(document)]:
            return Rejected(f"{missing[0]} has no token to learn: it is empty, or all of it stands in the other")
        return self._fit(*documents)

    def _conversations(self, prompt: Any, sides: list[Any]) -> list[Any]:
        before = [] if prompt is None else _messages(prompt, "user")
        answers = [_messages(side, "assistant") for side in sides]
        if all(_begins(answer, before) for answer in answers):
            answers = [answer[len(before) :] for answer in answers]
        if rejection := _misplaced(before, answers):
            return [rejection]
        whole = [[*before, *answer] for answer in answers]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*whole, strict=False))
        known = max(len(before), sum(1 for _ in same))
        if known == min(map(len, whole)):
            return [Rejected("chosen and rejected are the same, or one is the beginning of the other")]
        return [self._template.encode(side, known=known, longest=self.data.max_characters) for side in whole]

    def _texts(self, prompt: Any, sides: list[Any]) -> list[Any]:
        texts = [text_of("" if prompt is None else prompt, self.data), *(text_of(side, self.data) for side in sides)]
        if rejection := _first_rejection(texts):
            return [rejection]
        settings = self.data.tokenizer
        begin = [self.tokenizer.bos] if settings.add_bos and self.tokenizer.bos is not None else []
        end = [self.tokenizer.eos] if settings.add_eos and self.tokenizer.eos is not None else []
        before, *answers = (ids.tolist() for ids in self.tokenizer.encode_batch(texts))
        whole = [[*begin, *before, *answer, *end] for answer in answers]
        known = len(begin) + len(before)
        if prompt is None:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(*whole, strict=False))
            known = sum(1 for _ in same)
        if whole[0] == whole[1]:
            return [Rejected("chosen and rejected are the same")]
        return [_document(tokens, known) for tokens in whole]

    def _fit(self, chosen: Document, rejected: Document) -> Any:
        """The pair, or what is left of it where it is longer than a row."""
        longest = max(chosen.places, rejected.places)
        if longest <= self.seq_len:
            return Pair(chosen, rejected)
        prompt = min(_prompt(chosen), _prompt(rejected))
        if self.data.packing.overlong is not Overlong.truncate:
            lengths = (
                f"a prompt of {prompt} tokens, {len(chosen.tokens)} with chosen, {len(rejected.tokens)} with rejected"
            )
            return Rejected(f"{lengths}: over train.seq_len={self.seq_len} (data.packing.overlong=truncate cuts it)")
        # At least one token of the prompt stays, from which the first of the answer is predicted.
        cut = max(0, min(longest - self.seq_len, prompt - 1))
        pair = Pair(*(_part(document, cut, cut + self.seq_len + 1) for document in (chosen, rejected)))
        if any(not _learned(document) for document in (pair.chosen, pair.rejected)):
            return Rejected(f"nothing to learn is left of it within train.seq_len={self.seq_len}")
        return pair

    def row(self, example: Any, seq_len: int) -> Row:
        return {
            f"{side}_{name}": column
            for side in SIDES
            for name, column in _columns(getattr(example, side), seq_len).items()
        }


def _first_rejection(values: Sequence[Any]) -> Rejected | None:
    return next((value for value in values if isinstance(value, Rejected)), None)


def _messages(value: Any, role: str) -> list[Any]:
    """Messages as they are; anything else is one message, or is refused as one."""
    return list(value) if isinstance(value, (list, tuple)) else [{"role": role, "content": value}]


def _begins(messages: list[Any], before: list[Any]) -> bool:
    return len(messages) > len(before) and all(
        _told(one) == _told(other) for one, other in zip(messages, before, strict=False)
    )


def _told(message: Any) -> Any:
    """Who says what."""
    return (message.get("role"), message.get("content")) if isinstance(message, Mapping) else message


def _misplaced(before: list[Any], sides: list[list[Any]]) -> Rejected | None:
    """Whose turn it is shows columns that were exchanged: the user's stands in the prompt, the assistant's after it."""
    if before and _role(before[-1]) == "assistant":
        return Rejected(f"the prompt ends with a turn of the assistant; {EXPECTED}")
    for name, messages in zip(SIDES, sides, strict=True):
        if before and messages and _role(messages[0]) in ("user", "system") and len(messages) > 1:
            return Rejected(
                f"{name} begins with a turn of the {_role(messages[0])} that is not the prompt's; {EXPECTED}"
            )
        if messages and _role(messages[-1]) in ("user", "system"):
            return Rejected(f"{name} ends with a turn of the {_role(messages[-1])}; {EXPECTED}")
    return None


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _document(tokens: list[int], known: int) -> Document:
    return Document(np.array(tokens, np.int32), (np.arange(len(tokens)) >= known).astype(np.float32))


def _learned(document: Document) -> bool:
    return document.weights is not None and bool(document.weights[1:].any())


def _prompt(document: Document) -> int:
    """Tokens before the first that is learned."""
    assert document.weights is not None
    return int(np.argmax(document.weights > 0))


def _part(document: Document, start: int, stop: int) -> Document:
    assert document.weights is not None
    return Document(document.tokens[start:stop], document.weights[start:stop])


def _columns(document: Document, seq_len: int) -> Row:
    """tokens, targets, positions and weights of one sequence, padded."""
    count = document.places
    assert document.weights is not None
    values = {
        "tokens": document.tokens[:-1],
        "targets": document.tokens[1:],
        "positions": np.arange(count),
        "weights": document.weights[1:],
    }
    row = {name: np.zeros(seq_len, np.float32 if name == "weights" else np.int32) for name in values}
    for name, column in values.items():
        row[name][:count] = column
    return row


def build(corpus: Corpus, data: Data, seq_len: int) -> Preference:
    return Preference(corpus, data, load_tokenizer(data), seq_len)
