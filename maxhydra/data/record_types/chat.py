"""Conversations: a list of {role, content} messages, with loss on the assistant's turns and their end tokens.

Messages may have tool calls. A column `tools` lists the functions that the model may call in the conversation, as JSON
schemas or as the JSON text of their list. The template writes begin and end tokens, so data.tokenizer.add_bos and
add_eos are ignored.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.config.schema.data import Corpus, Data, LossOn, Thinking
from maxhydra.data.chat import ChatTemplate, Rendered, Spans, compile_chat_template
from maxhydra.data.record_types import Rejected, column_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Row
from maxhydra.data.tokenizers import load_tokenizer

# The reasoning in the text of an assistant's message, and fields of a message that hold it separately.
THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
THINKING_FIELDS = ("thinking", "reasoning", "reasoning_content")


@dataclasses.dataclass(frozen=True)
class Chat:
    corpus: Corpus
    data: Data
    template: ChatTemplate
    packs = True

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._example(record) for record in records]

    def _example(self, record: Record) -> Any:
        messages = column_of(record, self.corpus, "messages")
        tools = _tools_of(record.get(self.corpus.columns.get("tools", "tools")))
        if rejection := next((value for value in (messages, tools) if isinstance(value, Rejected)), None):
            return rejection
        if self.data.thinking is Thinking.drop:
            messages = without_thinking(messages)
        return self.template.encode(
            messages, max_characters=self.data.max_characters, tools=tools, select=self._spans_with_loss
        )

    def _spans_with_loss(self, rendered: Rendered) -> Spans:
        """Spans of the text that have loss, as data.loss_on and data.thinking say."""
        spans = {
            LossOn.assistant: rendered.turns,
            LossOn.last_turn: rendered.turns[-1:],
            LossOn.all: [(0, len(rendered.text))],
        }[self.data.loss_on]
        if self.data.thinking is not Thinking.mask:
            return spans
        parts = []
        for start, end in spans:
            for found in THINKING.finditer(rendered.text, start, end):
                parts.append((start, found.start()))
                start = found.end()
            parts.append((start, end))
        return parts

    def row(self, example: Any, seq_len: int) -> Row:
        raise TypeError("conversations are packed; use pack_rows")


def without_thinking(messages: Any) -> Any:
    """Messages without the reasoning of the assistant. Values that are not messages are returned unchanged."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return messages
    plain = []
    for message in messages:
        fields = {name: value for name, value in message.items() if name not in THINKING_FIELDS}
        if fields.get("role") == "assistant" and isinstance(fields.get("content"), str):
            fields["content"] = THINKING.sub("", fields["content"])
        plain.append(fields)
    return plain


def _tools_of(value: Any) -> Any:
    """The tools of a record: a list of JSON schemas, None if there are none, or a Rejected."""
    try:
        tools = json.loads(value) if isinstance(value, (str, bytes)) and value else value
    except ValueError as error:
        return Rejected(f"has tools that are not valid JSON: {error}")
    if not isinstance(tools, (list, tuple)):
        return Rejected(f"has tools of type {type(tools).__name__}, expected a list") if tools else None
    if not all(isinstance(tool, Mapping) for tool in tools):
        return Rejected("has tools that are not JSON objects")
    return tools or None


def build(corpus: Corpus, data: Data, seq_len: int) -> Chat:
    return Chat(corpus, data, compile_chat_template(load_tokenizer(data)))
