"""Conversations: rendered once by a Jinja template, tokenized once, and learned where the assistant speaks.

What the assistant says in a turn is what a model would have to generate there, exactly:

- It begins where the template's generation prompt would end. Literal text between there and the content counts only if
  it is blank, such as the space before an answer.
- It ends with the end of the turn: of the text that the template writes where the conversation ends with this turn, all
  through the first special token; where that text has none, all of it but blanks at its end. Where the conversation
  goes on and the template writes something else there, the turn has no end to learn. A newline after the special token,
  and the next turn's header, are not learned.
- A token is learned if its first character lies in that stretch: one that begins in the header would have been cut in
  two by the generation prompt, and a model never has to make it.

Where a template has `{% generation %}` blocks, a turn is what such a block writes, and nothing else is asked.
"""

import dataclasses
import datetime
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxhydra.config import ConfigError, Problem
from maxhydra.data.document import Document
from maxhydra.data.record_types import Rejected
from maxhydra.data.special_tokens import special_token_pattern
from maxhydra.data.tokenizers import Tokenizer

Message = Mapping[str, Any]

# The day that a template sees: were it today's, a run that resumes tomorrow would train on other tokens.
DAY = datetime.datetime(2024, 7, 26)

# Written around what a generation block writes; drawn anew in each process, so that no text can hold them.
_OPEN, _CLOSE = (secrets.token_hex(16) for _ in range(2))
# Blanks around a message's content, to see whether a template strips it.
_BEFORE, _AFTER = "\n\t ", "\t \n"

MARKS_HINT = "put {% generation %} and {% endgeneration %} around what the assistant says in the template"


class Generation(Extension):
    """`{% generation %}` blocks, which mark what is learned."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the characters of each turn that is learned."""

    text: str
    turns: list[tuple[int, int]]


class UnclearError(Exception):
    """A conversation of which it cannot be said what to learn."""


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, day: datetime.datetime = DAY):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": day.strftime}
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            reason = f"is no Jinja template: line {error.lineno}: {error.message}"
            raise ConfigError(Problem("data.tokenizer.chat_template", reason)) from None
        self._tokenizer = tokenizer
        self._names = special_token_pattern(tokenizer.marks)
        self._has_marks = re.search(r"{%[-+]?\s*generation\b", source) is not None
        names = {id: name for name, id in tokenizer.marks.items()}
        self._tokens = {
            role: names[id]
            for role, id in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos), ("pad_token", tokenizer.pad))
            if id is not None and id in names
        }
        self._skeleton = lru_cache(maxsize=1024)(self._plain_skeleton)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation so far, and the header of the assistant's answer. UnclearError where that cannot be."""
        messages = _checked(messages)
        self._reject_special_tokens(messages)
        return _unmarked(self._render(messages, add_generation_prompt=True)).text

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A whole conversation, and the assistant's turns in it. UnclearError where they cannot be told."""
        messages = _checked(messages)
        self._reject_special_tokens(messages)
        found = _unmarked(self._render(messages, add_generation_prompt=False))
        if self._has_marks:
            return found
        return Rendered(found.text, list(self._turns(messages, found.text)))

    def encode(self, messages: Any, *, known: int = 0, longest: int | None = None) -> Document | Rejected:
        """Tokens of a conversation, learned where the assistant speaks after the first `known` messages."""
        try:
            rendered = self.render(messages)
            turns = rendered.turns[self._turns_within(messages, known, len(rendered.turns)) :]
        except UnclearError as error:
            return Rejected(str(error))
        if longest is not None and len(rendered.text) > longest:
            return Rejected(f"{len(rendered.text):,} characters, over data.max_characters={longest:,}")
        if not any(start < end for start, end in turns):
            return Rejected("the assistant says nothing in it, so there is nothing to learn")
        tokens, spans = self._tokenizer.encode_marked(rendered.text)
        learned = np.zeros(len(rendered.text) + 1, np.float32)
        for start, end in turns:
            learned[start:end] = 1
        return Document(tokens, learned[spans[:, 0]])

    def _turns_within(self, messages: Sequence[Message], known: int, found: int) -> int:
        """How many of the turns are in the first messages."""
        said = sum(message["role"] == "assistant" for message in messages)
        if known and found != said:
            raise UnclearError(f"the template marks {found} turns of {said} of the assistant")
        return sum(message["role"] == "assistant" for message in messages[:known])

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        known = {"messages": [dict(message) for message in messages], "tools": None, "documents": None}
        try:
            text = self._template.render(**known, **self._tokens, add_generation_prompt=add_generation_prompt)
            text.encode()
        except TemplateError as error:
            raise UnclearError(f"the chat template says: {error.message}") from None
        except UnicodeEncodeError as error:
            raise UnclearError(f"not Unicode text: {error}") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise UnclearError(f"the chat template fails: {type(error).__name__}: {error}") from None
        return text

    def _reject_special_tokens(self, value: Any) -> None:
        """A special token's text within a message would become that token, and could begin or end a turn."""
        if isinstance(value, str):
            if self._names and (found := self._names.search(value)):
                raise UnclearError(f"a message holds the text of the special token {found[0]}")
            if _OPEN in value or _CLOSE in value:
                raise UnclearError("a message holds a mark of ours")
        elif isinstance(value, Mapping):
            for part in value.values():
                self._reject_special_tokens(part)
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            for part in value:
                self._reject_special_tokens(part)

    def _turns(self, messages: Sequence[Message], text: str) -> Iterator[tuple[int, int]]:
        """The assistant's turns in a rendering, by putting the contents into what the template writes around them."""
        skeleton = self._skeleton_of(messages)
        at, places = len(skeleton.gaps[0]), []
        filled = [skeleton.gaps[0]]
        for message, gap, strips in zip(messages, skeleton.gaps[1:], skeleton.strips, strict=True):
            content = _stripped(message["content"], *strips)
            places.append((at, at + len(content)))
            filled += [content, gap]
            at += len(content) + len(gap)
        if "".join(filled) != text:
            raise UnclearError(f"the chat template changes what messages say; {MARKS_HINT}")
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = places[number]
                before, after = skeleton.gaps[number], skeleton.gaps[number + 1]
                yield start - self._blank(messages, number, before), end + self._end(messages, number, after)

    def _blank(self, messages: Sequence[Message], number: int, gap: str) -> int:
        """Blank characters right before a turn's content that the generation prompt leaves to the model."""
        try:
            prompt = self._skeleton_of(messages[:number], prompt=True).gaps[-1]
        except UnclearError:
            return 0
        left = gap.removeprefix(prompt) if gap.startswith(prompt) else ""
        return len(left) if not left.strip() else 0

    def _end(self, messages: Sequence[Message], number: int, gap: str) -> int:
        """Characters after a turn's content that end it."""
        try:
            final = self._skeleton_of(messages[: number + 1]).gaps[-1]
        except UnclearError:
            return 0
        special = self._names.search(final) if self._names else None
        ending = final[: special.end()] if special else final.rstrip()
        return len(ending) if gap.startswith(ending) else 0

    def _skeleton_of(self, messages: Sequence[Message], *, prompt: bool = False) -> "_Skeleton":
        """What the template writes around messages; it depends on their roles alone, where they have nothing else."""
        if all(message.keys() <= {"role", "content"} for message in messages):
            return self._skeleton(tuple(message["role"] for message in messages), prompt=prompt)
        for message in messages:
            extra = [key for key, value in message.items() if key not in ("role", "content") and value]
            if message["role"] == "assistant" and extra:
                raise UnclearError(f"a turn of the assistant has {', '.join(extra)}; {MARKS_HINT}")
        return self._make_skeleton(messages, prompt=prompt)

    def _plain_skeleton(self, roles: tuple[str, ...], *, prompt: bool) -> "_Skeleton":
        return self._make_skeleton([{"role": role} for role in roles], prompt=prompt)

    def _make_skeleton(self, messages: Sequence[Message], *, prompt: bool) -> "_Skeleton":
        """Render stand-ins for the contents, once bare and once among blanks, and look at what is around them."""
        names = [secrets.token_hex(16) for _ in messages]

        def gaps(before: str, after: str) -> list[str]:
            twins = [
                {**message, "content": f"{before}{name}{after}"} for message, name in zip(messages, names, strict=True)
            ]
            text = _unmarked(self._render(twins, add_generation_prompt=prompt)).text
            parts = []
            for name in names:
                found = text.split(name)
                if len(found) != 2:
                    raise UnclearError(f"the chat template leaves out or repeats what a message says; {MARKS_HINT}")
                parts.append(found[0])
                text = found[1]
            return [*parts, text]

        bare, blank = gaps("", ""), gaps(_BEFORE, _AFTER)
        left, right = [], []
        for number, (gap, among) in enumerate(zip(bare, blank, strict=True)):
            for after, before in (("", ""), (_AFTER, ""), ("", _BEFORE), (_AFTER, _BEFORE)):
                if among == f"{after}{gap}{before}":
                    right += [not after] if number else []
                    left += [not before] if number < len(messages) else []
                    break
            else:
                raise UnclearError(f"the chat template changes what messages say; {MARKS_HINT}")
        return _Skeleton(bare, list(zip(left, right, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Skeleton:
    """What a template writes before, between and after contents, and how it strips each: left, right."""

    gaps: list[str]
    strips: list[tuple[bool, bool]]


def chat_template(tokenizer: Tokenizer, *, day: datetime.datetime = DAY) -> ChatTemplate:
    """The tokenizer's template, or what to do where it has none."""
    if tokenizer.chat_template is None:
        reason = "is needed for conversations, and the tokenizer has none of its own"
        accepted = "a file with a Jinja template"
        raise ConfigError(Problem("data.tokenizer.chat_template", reason, value=None, accepted=accepted))
    return ChatTemplate(tokenizer.chat_template, tokenizer, day=day)


def render_prompt(messages: Sequence[Message], tokenizer: Tokenizer, *, day: datetime.datetime = DAY) -> str:
    """A conversation that the assistant is to answer, as text for `encode_marked`."""
    return chat_template(tokenizer, day=day).prompt(messages)


def _checked(messages: Any) -> list[Message]:
    """Messages that have a role and text. Keys without a value go: columnar files give every message all keys."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise UnclearError(f"not a list of messages but {_kind(messages)}")
    found: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnclearError(f"message {number} has no role; it is {_kind(message)}")
        content = message.get("content")
        found.append({key: value for key, value in message.items() if value is not None or key == "content"})
        if not isinstance(content, str) and not (content is None and found[-1].keys() - {"role", "content"}):
            raise UnclearError(f"message {number} ({message['role']}) has no text as content but {_kind(content)}")
    return found


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'nothing'}"
    return "nothing" if value is None or (isinstance(value, list) and not value) else type(value).__name__


def _unmarked(text: str) -> Rendered:
    """A rendering without the marks of its generation blocks, and where they stood."""
    plain, turns, length = [], [], 0
    for number, part in enumerate(re.split(f"{_OPEN}|{_CLOSE}", text)):
        if number % 2:
            turns.append((length, length + len(part)))
        plain.append(part)
        length += len(part)
    return Rendered("".join(plain), turns)


def _stripped(content: str | None, left: bool, right: bool) -> str:
    content = content or ""
    content = content.lstrip() if left else content
    return content.rstrip() if right else content


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is, where Jinja's own would write it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(reason: str) -> None:
    raise TemplateError(reason)
