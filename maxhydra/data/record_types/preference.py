"""Preference pairs: a chosen and a rejected response to the same prompt, which has no loss.

chosen and rejected are text or messages. The prompt is a separate column, text or messages, or else the common prefix
of both: the same messages, or the same tokens. Messages may start with the prompt even if it also has a column. Texts
are tokenized separately from their prompt, as at inference; messages are rendered as one conversation.

data.columns.margin names a column with a number by which the reward of chosen should exceed that of rejected; rows then
have a column `margin`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Corpus, Data, Overlong
from maxhydra.data.record_types import Rejected, column_of, first_rejection, text_of
from maxhydra.data.record_types._unpacked import UnpackedRecordType
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row
from maxhydra.data.tokenizers import load_tokenizer

RESPONSES = ("chosen", "rejected")
EXPECTED = (
    "expected chosen and rejected (text, or messages ending with the assistant), and prompt unless both include it"
)


@dataclasses.dataclass(frozen=True)
class Pair:
    chosen: Document
    rejected: Document
    margin: float = 0.0


class Preference(UnpackedRecordType):
    def _example(self, record: Record) -> Any:
        documents = self._documents(record)
        if rejection := first_rejection(documents):
            return rejection
        if missing := [name for name, document in zip(RESPONSES, documents, strict=True) if not has_loss(document)]:
            return Rejected(f"{missing[0]} has no token to train on: it is empty, or a prefix of the other response")
        pair = self._fit(*documents)
        if "margin" not in self.corpus.columns or isinstance(pair, Rejected):
            return pair
        margin = number_of(column_of(record, self.corpus, "margin"), "margin")
        return margin if isinstance(margin, Rejected) else dataclasses.replace(pair, margin=margin)

    def _documents(self, record: Record) -> list[Any]:
        """The tokenized conversations with chosen and rejected, or a Rejected."""
        prompt = record.get(self.corpus.columns.get("prompt", "prompt"))
        responses = [column_of(record, self.corpus, name) for name in RESPONSES]
        if rejection := first_rejection(responses):
            return [Rejected(f"{rejection.reason}; {EXPECTED}")]
        if any(isinstance(value, np.ndarray) for value in (prompt, *responses)):
            return [Rejected(f"contains an array of numbers; {EXPECTED}")]
        is_chat = any(not isinstance(value, (str, bytes)) for value in (prompt, *responses) if value is not None)
        return self._encode_messages(prompt, responses) if is_chat else self._encode_texts(prompt, responses)

    def _encode_messages(self, prompt: Any, responses: list[Any]) -> list[Any]:
        context = [] if prompt is None else as_messages(prompt, "user")
        continuations = [as_messages(response, "assistant") for response in responses]
        if all(_starts_with(messages, context) for messages in continuations):
            continuations = [messages[len(context) :] for messages in continuations]
        if rejection := _check_roles(context, continuations):
            return [rejection]
        conversations = [[*context, *messages] for messages in continuations]
        common = takewhile(lambda pair: pair[0] == pair[1], zip(*conversations, strict=False))
        known = max(len(context), sum(1 for _ in common))
        if known == min(map(len, conversations)):
            return [Rejected("chosen and rejected are equal, or one is a prefix of the other")]
        return [
            self._template.encode(messages, known=known, max_characters=self.data.max_characters)
            for messages in conversations
        ]

    def _encode_texts(self, prompt: Any, responses: list[Any]) -> list[Any]:
        texts = [text_of("" if prompt is None else prompt, self.data)]
        texts += [text_of(response, self.data) for response in responses]
        if rejection := first_rejection(texts):
            return [rejection]
        settings = self.data.tokenizer
        begin = [self.tokenizer.bos] if settings.add_bos and self.tokenizer.bos is not None else []
        end = [self.tokenizer.eos] if settings.add_eos and self.tokenizer.eos is not None else []
        prompt_ids, *response_ids = (ids.tolist() for ids in self.tokenizer.encode_batch(texts))
        sequences = [[*begin, *prompt_ids, *ids, *end] for ids in response_ids]
        known = len(begin) + len(prompt_ids)
        if prompt is None:
            common = takewhile(lambda pair: pair[0] == pair[1], zip(*sequences, strict=False))
            known = sum(1 for _ in common)
        if sequences[0] == sequences[1]:
            return [Rejected("chosen and rejected are equal")]
        return [document_of(tokens, known) for tokens in sequences]

    def _fit(self, chosen: Document, rejected: Document) -> Any:
        """Truncate a pair that is longer than a row as data.packing.overlong says, or reject it."""
        longest = max(chosen.num_targets, rejected.num_targets)
        if longest <= self.seq_len:
            return Pair(chosen, rejected)
        prompt = min(prompt_length(chosen), prompt_length(rejected))
        if self.data.packing.overlong is not Overlong.truncate:
            lengths = (
                f"has {prompt} prompt tokens, {len(chosen.tokens)} with chosen, {len(rejected.tokens)} with rejected"
            )
            return Rejected(
                f"{lengths}: more than train.seq_len={self.seq_len}; set data.packing.overlong=truncate to truncate"
            )
        # At least one token of the prompt remains, from which the first token of the response is predicted.
        cut = max(0, min(longest - self.seq_len, prompt - 1))
        chosen, rejected = (_slice(document, cut, cut + self.seq_len + 1) for document in (chosen, rejected))
        pair = Pair(chosen, rejected)
        if any(not has_loss(document) for document in (pair.chosen, pair.rejected)):
            return Rejected(f"has no token to train on after truncation to train.seq_len={self.seq_len}")
        return pair

    def row(self, example: Any, seq_len: int) -> Row:
        margin = {"margin": np.array(example.margin, np.float32)} if "margin" in self.corpus.columns else {}
        return margin | {
            f"{response}_{name}": column
            for response in RESPONSES
            for name, column in padded_columns(getattr(example, response), seq_len).items()
        }


def number_of(value: Any, role: str) -> Any:
    """Return a finite number, or a Rejected."""
    if isinstance(value, Rejected):
        return value
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return float(value) if is_number and np.isfinite(value) else Rejected(f"{role} is {value!r:.80}, not a number")


def as_messages(value: Any, author: str) -> list[Any]:
    """Return messages unchanged, and anything else as one message of a role."""
    return list(value) if isinstance(value, (list, tuple)) else [{"role": author, "content": value}]


def _starts_with(messages: list[Any], prefix: list[Any]) -> bool:
    return len(messages) > len(prefix) and all(
        _role_and_content(message) == _role_and_content(other) for message, other in zip(messages, prefix, strict=False)
    )


def _role_and_content(message: Any) -> Any:
    return (message.get("role"), message.get("content")) if isinstance(message, Mapping) else message


def _check_roles(context: list[Any], responses: list[list[Any]]) -> Rejected | None:
    """Reject columns that seem swapped: the prompt must not end, and a response must end, with the assistant."""
    if context and role(context[-1]) == "assistant":
        return Rejected(f"the prompt ends with a message of the assistant; {EXPECTED}")
    for name, messages in zip(RESPONSES, responses, strict=True):
        if context and messages and role(messages[0]) in ("user", "system") and len(messages) > 1:
            return Rejected(
                f"{name} starts with a message of the {role(messages[0])} that is not in the prompt; {EXPECTED}"
            )
        if messages and role(messages[-1]) in ("user", "system"):
            return Rejected(f"{name} ends with a message of the {role(messages[-1])}; {EXPECTED}")
    return None


def role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def document_of(tokens: list[int], known: int) -> Document:
    return Document(np.array(tokens, np.int32), (np.arange(len(tokens)) >= known).astype(np.float32))


def has_loss(document: Document) -> bool:
    return document.weights is not None and bool(document.weights[1:].any())


def fit_document(document: Document, data: Data, seq_len: int, *, start: Callable[[Document], int]) -> Any:
    """Truncate a document that is longer than a row as data.packing.overlong says, from `start` on, or reject it."""
    if document.num_targets <= seq_len:
        return document
    if data.packing.overlong is not Overlong.truncate:
        reason = f"has {len(document.tokens)} tokens, more than train.seq_len={seq_len}"
        return Rejected(f"{reason}; set data.packing.overlong=truncate to truncate")
    first = start(document)
    window = slice(first, first + seq_len + 1)
    assert document.weights is not None
    return Document(document.tokens[window], document.weights[window])


def prompt_length(document: Document) -> int:
    """Number of tokens before the first that has loss."""
    assert document.weights is not None
    return int(np.argmax(document.weights > 0))


def _slice(document: Document, start: int, stop: int) -> Document:
    assert document.weights is not None
    return Document(document.tokens[start:stop], document.weights[start:stop])


def padded_columns(document: Document, seq_len: int) -> Row:
    """Padded tokens, targets, positions and weights of one sequence."""
    count = document.num_targets
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
