"""Chat templates: conversations are rendered once with Jinja, tokenized once, with loss on the assistant's turns.

The loss covers exactly the text that a model would have to generate in an assistant turn:

- It starts where the template's generation prompt would end. Literal text between there and the content is included
  only if it is whitespace, such as a space before the response.
- It ends with the end of the turn: of the text that the template writes if the conversation ends with this turn,
  everything through the first special token or, if there is none, everything but trailing whitespace. If the
  conversation continues and the template writes something else there, the turn has no end to learn. A newline after the
  special token and the header of the next turn are excluded.
- A token has loss if its first character is in that span: a token that starts in the header would have been split by
  the generation prompt, so a model never has to generate it.

If a template has `{% generation %}` blocks, the text of these blocks is used instead.
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
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from maxhydra.config import ConfigError, Problem
from maxhydra.data.record_types import Rejected
from maxhydra.data.rows import Document
from maxhydra.data.template_budget import TemplateLimitError, limited
from maxhydra.data.template_sandbox import MAX_SOURCE, LimitedEnvironment
from maxhydra.data.tokenizers import Tokenizer, TokenizerError, special_token_pattern

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
"""Functions that the model may call, as JSON schemas in the form that transformers and the OpenAI API use."""

# The date that templates see. With today's date, a run that resumes tomorrow would train on different tokens.
DAY = datetime.datetime(2024, 7, 26)

# Delimiters around the output of a generation block; random in each process, so that no text can contain them.
_OPEN, _CLOSE = (secrets.token_hex(16) for _ in range(2))
# Whitespace put around a message's content to detect whether a template strips it.
_BEFORE, _AFTER = "\n\t ", "\t \n"

# Characters of a reason that a template gives, which may contain a whole conversation.
MAX_REASON = 300
GENERATION_HINT = "put {% generation %} and {% endgeneration %} around the assistant's text in the template"


class Generation(Extension):
    """Jinja extension for `{% generation %}` blocks, which delimit the text that has loss."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_delimit"), [], [], body).set_lineno(line)

    def _delimit(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


Spans = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A rendered conversation, and the character span of each turn that has loss."""

    text: str
    turns: Spans


class ChatTemplateError(Exception):
    """A conversation that the template cannot render, or whose assistant turns cannot be located."""

    is_refusal = False
    """True if the template rejected the conversation with raise_exception."""


class ChatTemplate:
    """A compiled chat template of a tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, day: datetime.datetime = DAY):
        self._template = _compile(source, day)
        self._tokenizer = tokenizer
        self._special_pattern = special_token_pattern(tokenizer.special_token_ids)
        self._has_generation_blocks = re.search(r"{%[-+]?\s*generation\b", source) is not None
        names = {id: name for name, id in tokenizer.special_token_ids.items()}
        self._special_names = {
            role: names[id]
            for role, id in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos), ("pad_token", tokenizer.pad))
            if id is not None and id in names
        }
        self._cached_skeleton = lru_cache(maxsize=1024)(self._plain_skeleton)

    def check(self) -> None:
        """Raise ConfigError if the template fails for every simple conversation, for a reason other than its roles."""
        problems = []
        for roles in (("user",), ("user", "assistant", "user"), ("system", "user")):
            try:
                self._render([{"role": role, "content": "a"} for role in roles], add_generation_prompt=True)
                return
            except ChatTemplateError as error:
                if error.is_refusal:
                    return
                problems.append(str(error))
        reason = f"cannot render a conversation: {problems[0]}"
        raise ConfigError(Problem("data.tokenizer.chat_template", reason, hint="correct the template, or set another"))

    def prompt(self, messages: Sequence[Message], *, tools: Tools = None, add_generation_prompt: bool = True) -> str:
        """Render the conversation so far plus the assistant header. ChatTemplateError if that is impossible."""
        messages = _check_messages(messages)
        self._reject_special_tokens(messages)
        text = self._render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return _strip_delimiters(text).text

    def render(self, messages: Sequence[Message], tools: Tools = None) -> Rendered:
        """Render a conversation and locate the assistant's turns. ChatTemplateError if that is impossible."""
        messages = _check_messages(messages)
        self._reject_special_tokens([*messages, *(tools or ())])
        rendered = _strip_delimiters(self._render(messages, add_generation_prompt=False, tools=tools))
        if self._has_generation_blocks:
            return rendered
        if tools:
            raise ChatTemplateError(f"the record has tools; {GENERATION_HINT}")
        return Rendered(rendered.text, list(self._turns(messages, rendered.text)))

    def encode(
        self,
        messages: Any,
        *,
        known: int = 0,
        max_characters: int | None = None,
        tools: Tools = None,
        select: Callable[[Rendered], Spans] = lambda rendered: rendered.turns,
    ) -> Document | Rejected:
        """Tokenize a conversation, with loss on the assistant's turns after the first `known` messages.

        `select` returns the spans that have loss instead of these turns.
        """
        try:
            rendered = self.render(messages, tools)
            later = rendered.turns[self._turns_within(messages, known, len(rendered.turns)) :]
            turns = select(Rendered(rendered.text, later))
        except ChatTemplateError as error:
            return Rejected(str(error))
        if max_characters is not None and len(rendered.text) > max_characters:
            return Rejected(f"has {len(rendered.text):,} characters, more than data.max_characters={max_characters:,}")
        if not any(start < end for start, end in turns):
            return Rejected("has no text of the assistant to train on")
        try:
            tokens, spans = self._tokenizer.encode_with_special_tokens(rendered.text)
        except TokenizerError as error:
            return Rejected(error.problems[0].reason)
        loss_weights = np.zeros(len(rendered.text) + 1, np.float32)
        for start, end in turns:
            loss_weights[start:end] = 1
        plain = self._special_pattern.sub("", rendered.text) if self._special_pattern else rendered.text
        return Document(tokens, loss_weights[spans[:, 0]], text_bytes=len(plain.encode()))

    def _turns_within(self, messages: Sequence[Message], known: int, num_turns: int) -> int:
        """Number of assistant turns within the first `known` messages."""
        num_messages = sum(message["role"] == "assistant" for message in messages)
        if known and num_turns != num_messages:
            raise ChatTemplateError(
                f"the template has {num_turns} generation blocks for {num_messages} assistant messages"
            )
        return sum(message["role"] == "assistant" for message in messages[:known])

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = None) -> str:
        variables = {"messages": [dict(message) for message in messages], "tools": tools, "documents": None}
        try:
            with limited(messages):
                text = self._template.render(
                    **variables, **self._special_names, add_generation_prompt=add_generation_prompt
                )
            text.encode()
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the chat template exceeds a limit: {error.message}") from None
        except TemplateError as error:
            failure = ChatTemplateError(f"the chat template raised: {str(error.message)[:MAX_REASON]}")
            failure.is_refusal = type(error) is TemplateError
            raise failure from None
        except UnicodeEncodeError as error:
            raise ChatTemplateError(f"is not valid Unicode: {error.reason} at position {error.start}") from None
        except Exception as error:  # a template can divide by zero, recurse without end, and more
            reason = f"{type(error).__name__}: {str(error)[:MAX_REASON]}"
            raise ChatTemplateError(f"the chat template failed: {reason}") from None
        return text

    def _reject_special_tokens(self, messages: Sequence[Message]) -> None:
        """Raise if a message contains the text of a special token, which could forge the start or end of a turn."""
        values: list[Any] = list(messages)
        while values:
            value = values.pop()
            if isinstance(value, str):
                if self._special_pattern and (found := self._special_pattern.search(value)):
                    raise ChatTemplateError(f"a message contains the text of the special token {found[0]}")
                if _OPEN in value or _CLOSE in value:
                    raise ChatTemplateError("a message contains an internal delimiter")
            elif isinstance(value, Mapping):
                values.extend(value.values())
            elif isinstance(value, Sequence) and not isinstance(value, bytes):
                values.extend(value)

    def _turns(self, messages: Sequence[Message], text: str) -> Iterator[tuple[int, int]]:
        """Locate the assistant's turns by inserting the contents into the text that the template writes around them."""
        skeleton = self._skeleton_of(messages)
        at, spans = len(skeleton.gaps[0]), []
        filled = [skeleton.gaps[0]]
        for message, gap, strips in zip(messages, skeleton.gaps[1:], skeleton.strips, strict=True):
            content = _stripped(message["content"], *strips)
            spans.append((at, at + len(content)))
            filled += [content, gap]
            at += len(content) + len(gap)
        if "".join(filled) != text:
            raise ChatTemplateError(f"the chat template changes the text of messages; {GENERATION_HINT}")
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = spans[number]
                before, after = skeleton.gaps[number], skeleton.gaps[number + 1]
                yield (
                    start - self._leading_blanks(messages, number, before),
                    end + self._end_of_turn(messages, number, after),
                )

    def _leading_blanks(self, messages: Sequence[Message], number: int, gap: str) -> int:
        """Number of whitespace characters before a turn's content that the generation prompt leaves to the model."""
        try:
            prompt = self._skeleton_of(messages[:number], prompt=True).gaps[-1]
        except ChatTemplateError:
            return 0
        rest = gap.removeprefix(prompt) if gap.startswith(prompt) else ""
        return len(rest) if not rest.strip() else 0

    def _end_of_turn(self, messages: Sequence[Message], number: int, gap: str) -> int:
        """Number of characters after a turn's content that end the turn."""
        try:
            final = self._skeleton_of(messages[: number + 1]).gaps[-1]
        except ChatTemplateError:
            return 0
        special = self._special_pattern.search(final) if self._special_pattern else None
        ending = final[: special.end()] if special else final.rstrip()
        return len(ending) if gap.startswith(ending) else 0

    def _skeleton_of(self, messages: Sequence[Message], *, prompt: bool = False) -> "_Skeleton":
        """Template text around messages; cached by roles if messages have only a role and content."""
        if all(message.keys() <= {"role", "content"} for message in messages):
            return self._cached_skeleton(tuple(message["role"] for message in messages), prompt=prompt)
        for message in messages:
            extra = [key for key, value in message.items() if key not in ("role", "content") and value]
            if message["role"] == "assistant" and extra:
                raise ChatTemplateError(f"an assistant message also has {', '.join(extra)}; {GENERATION_HINT}")
        return self._make_skeleton(messages, prompt=prompt)

    def _plain_skeleton(self, roles: tuple[str, ...], *, prompt: bool) -> "_Skeleton":
        return self._make_skeleton([{"role": role} for role in roles], prompt=prompt)

    def _make_skeleton(self, messages: Sequence[Message], *, prompt: bool) -> "_Skeleton":
        """Render placeholders for the contents, once bare and once surrounded by blanks, and compare the text around
        them."""
        names = [secrets.token_hex(16) for _ in messages]

        def gaps(before: str, after: str) -> list[str]:
            placeholders = [
                {**message, "content": f"{before}{name}{after}"} for message, name in zip(messages, names, strict=True)
            ]
            text = _strip_delimiters(self._render(placeholders, add_generation_prompt=prompt)).text
            parts = []
            for name in names:
                pieces = text.split(name)
                if len(pieces) != 2:
                    raise ChatTemplateError(
                        f"the chat template omits or repeats the text of a message; {GENERATION_HINT}"
                    )
                parts.append(pieces[0])
                text = pieces[1]
            return [*parts, text]

        bare, padded = gaps("", ""), gaps(_BEFORE, _AFTER)
        strips_before, strips_after = [], []
        for number, (gap, padded_gap) in enumerate(zip(bare, padded, strict=True)):
            for after, before in (("", ""), (_AFTER, ""), ("", _BEFORE), (_AFTER, _BEFORE)):
                if padded_gap == f"{after}{gap}{before}":
                    strips_after += [not after] if number else []
                    strips_before += [not before] if number < len(messages) else []
                    break
            else:
                raise ChatTemplateError(f"the chat template changes the text of messages; {GENERATION_HINT}")
        return _Skeleton(bare, list(zip(strips_before, strips_after, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Skeleton:
    """Template text before, between and after the contents, and whether each content is stripped (left, right)."""

    gaps: list[str]
    strips: list[tuple[bool, bool]]


def compile_chat_template(tokenizer: Tokenizer, *, day: datetime.datetime = DAY) -> ChatTemplate:
    """Compile the tokenizer's chat template; an error says what to set if it has none."""
    if tokenizer.chat_template is None:
        reason = "must be set for conversations, because the tokenizer has no chat template"
        accepted = "a file with a Jinja template"
        raise ConfigError(Problem("data.tokenizer.chat_template", reason, value=None, accepted=accepted))
    template = ChatTemplate(tokenizer.chat_template, tokenizer, day=day)
    template.check()
    return template


def _compile(source: str, day: datetime.datetime) -> Template:
    """Compile a template in the sandbox."""
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.add_filter("tojson", _tojson)
    delimit = environment.extensions[Generation.identifier]._delimit  # type: ignore[attr-defined]
    environment.add_functions(
        raise_exception=_raise, strftime_now=lambda format: _strftime(day, format), _delimit=delimit
    )
    try:
        if len(source) > MAX_SOURCE:
            raise ValueError(f"it has {len(source):,} characters, the limit is {MAX_SOURCE:,}")
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        reason = f"is not a valid Jinja template: line {error.lineno}: {str(error.message)[:MAX_REASON]}"
    except Exception as error:  # deep nesting and huge numbers fail in Jinja's parser or in Python's
        reason = f"is not a valid Jinja template: {type(error).__name__}: {str(error)[:MAX_REASON]}"
    raise ConfigError(Problem("data.tokenizer.chat_template", reason))


def render_prompt(messages: Sequence[Message], tokenizer: Tokenizer, *, day: datetime.datetime = DAY) -> str:
    """Render a conversation with a generation prompt, as text for `encode_with_special_tokens`."""
    return compile_chat_template(tokenizer, day=day).prompt(messages)


def _check_messages(messages: Any) -> list[Message]:
    """Check that messages have a role and text; drop None values, since columnar files give every message all keys."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ChatTemplateError(f"expected a list of messages, found {_kind(messages)}")
    checked: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"message {number} has no role: it is {_kind(message)}")
        content = message.get("content")
        checked.append({key: value for key, value in message.items() if value is not None or key == "content"})
        if not isinstance(content, str) and not (content is None and checked[-1].keys() - {"role", "content"}):
            raise ChatTemplateError(
                f"message {number} ({message['role']}): expected text as content, found {_kind(content)}"
            )
    return checked


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
    return "nothing" if value is None or (isinstance(value, list) and not value) else type(value).__name__


def _strip_delimiters(text: str) -> Rendered:
    """Remove the delimiters of generation blocks, and return the spans between them."""
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


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime(day: datetime.datetime, format: str) -> str:
    # The result can be 256 times as long as the format.
    if len(format) > 1000:
        raise TemplateLimitError("the format of strftime_now has more than 1,000 characters")
    return day.strftime(format)


def _raise(reason: str) -> None:
    raise TemplateError(reason)
