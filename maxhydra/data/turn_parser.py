"""Splits an assistant turn into reasoning, content and tool calls, while it is generated.

The text contains the names of special tokens, except of the one that ended the turn. Calls themselves are parsed by
tool_calls.py; a call is returned as soon as its text is complete.
"""

import json
import re
from typing import NamedTuple

from maxhydra.data.tool_calls import FORMATS

# Texts around reasoning, by the opening one. Templates contain them if a model was trained to reason.
REASONING_MARKS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
HARMONY_START, HARMONY_MESSAGE = "<|start|>assistant", "<|message|>"
HARMONY_ENDS = ("<|end|>", HARMONY_START)
# Where the calls of a format start, and what completes one; calls without such an end are complete with the turn.
CALL_STARTS = {
    "hermes": ("<tool_call>",),
    "json": ("<|python_tag|>",),
    "bracket": ("[TOOL_CALLS]",),
    "token": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "python": ("```tool_code",),
    "harmony": (),
}
CALL_ENDS = {"hermes": "</tool_call>", "token": "<｜tool▁call▁end｜>", "harmony": "<|call|>"}
_RECIPIENT = re.compile(r"\bto=")


class Piece(NamedTuple):
    """A part of a turn: text of kind `content` or `reasoning`, or the arguments of a call as JSON."""

    kind: str
    text: str
    name: str = ""
    """The function, if kind is `call`."""


def has_reasoning(template: str) -> bool:
    """Whether the turns of a template's model may contain reasoning."""
    return any(mark in template for mark in (*REASONING_MARKS, "<|channel|>"))


class TurnParser:
    """Parses one turn. `format`: a key of `tool_calls.FORMATS`."""

    def __init__(self, format: str, *, has_tools: bool, prompt_end: str = ""):
        """`has_tools`: without tools, nothing is a call. `prompt_end`: text before the turn; it may open reasoning."""
        self._format, self._has_tools = format, has_tools
        opened = next((mark for mark in REASONING_MARKS if prompt_end.rstrip().endswith(mark)), None)
        self._close = REASONING_MARKS[opened] if opened else ""
        self._state = "header" if format == "harmony" else "reasoning" if opened else "content"
        self._buffer = ""
        self._is_first = True
        """Only whitespace of the turn was read so far."""
        self._is_stripped = bool(opened)
        """Whitespace is dropped: it follows a mark."""
        self.num_calls = 0

    def add(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Return the pieces that can no longer change; `is_last`: the turn ends with this text."""
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            before = self._state, len(self._buffer)
            pieces += {
                "content": self._read_content,
                "reasoning": self._read_reasoning,
                "header": self._read_header,
                "calls": self._read_calls,
            }[self._state](is_last)
            if (self._state, len(self._buffer)) == before:
                return [piece for piece in pieces if piece.text or piece.kind == "call"]

    def _read_content(self, is_last: bool) -> list[Piece]:
        if self._is_first and self._has_tools and self._format == "json" and self._buffer.lstrip()[:1] == "{":
            self._state = "calls"
            return []
        reasoning = REASONING_MARKS if self._format != "harmony" and self._is_first else {}
        calls = CALL_STARTS[self._format] if self._has_tools else ()
        ends = HARMONY_ENDS if self._format == "harmony" else ()
        text, mark = self._take_until((*reasoning, *calls, *ends), is_last)
        # Reasoning comes before everything else.
        self._is_first = self._is_first and not text.strip()
        if mark in reasoning:
            self._state, self._close, self._is_stripped = "reasoning", reasoning[mark], True
            return []
        elif mark in calls:
            self._state, self._buffer = "calls", mark + self._buffer
        elif mark:
            self._state = "header"
        return [Piece("content", text)]

    def _read_reasoning(self, is_last: bool) -> list[Piece]:
        ends = HARMONY_ENDS if self._format == "harmony" else (self._close,)
        text, mark = self._take_until(ends, is_last)
        if mark:
            self._state = "header" if self._format == "harmony" else "content"
            self._is_first, self._is_stripped = False, True
            text = text.rstrip()
        return [Piece("reasoning", text)]

    def _read_header(self, is_last: bool) -> list[Piece]:
        """Harmony: the header says who a message is for, and on which channel."""
        header, found, body = self._buffer.partition(HARMONY_MESSAGE)
        if not found:
            return []
        if self._has_tools and _RECIPIENT.search(header):
            self._state = "calls"
            return []
        self._state, self._buffer = ("reasoning" if "analysis" in header else "content"), body
        return []

    def _read_calls(self, is_last: bool) -> list[Piece]:
        end = CALL_ENDS.get(self._format)
        num_ended = self._buffer.count(end) if end else 0
        if not is_last and num_ended <= self.num_calls:
            return []
        content, calls = FORMATS[self._format](self._buffer)
        valid = [call for call in calls if not isinstance(call, str)]
        new = valid[self.num_calls :] if is_last else valid[self.num_calls : num_ended]
        pieces = [Piece("call", json.dumps(arguments, ensure_ascii=False), name) for name, arguments in new]
        self.num_calls += len(new)
        if is_last:
            # A turn with nothing that can be parsed is passed on as it is.
            pieces.append(Piece("content", content.strip() if valid else self._buffer))
            self._state, self._buffer = "content", ""
        return pieces

    def _take_until(self, marks: tuple[str, ...], is_last: bool) -> tuple[str, str]:
        """Take the text before the first mark, and the mark; without one, all that cannot be the start of a mark."""
        found = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            return text.lstrip() if self._is_stripped else text, mark
        if self._is_stripped:
            self._buffer = self._buffer.lstrip()
            self._is_stripped = not self._buffer
        longest = 0 if is_last else max(map(len, marks), default=0) - 1
        tail = next((n for n in range(longest, 0, -1) if any(m.startswith(self._buffer[-n:]) for m in marks)), 0)
        tail = min(tail, len(self._buffer))
        cut = len(self._buffer) - tail
        if self._state == "reasoning" and not is_last:
            cut = len(self._buffer[:cut].rstrip())
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return text, ""
