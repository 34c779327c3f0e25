"""Text and conversations as the token ids that a model is asked with, and the tokens that end its answer."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.data import tokenizer
from maxhydra.data.chat import ChatTemplate, UnclearError, chat_template


class PromptError(ValueError):
    """A prompt that cannot be asked, and why."""


class PromptEncoder:
    """What the tokenizer of a run makes of prompts. Safe to call from several threads."""

    def __init__(self, data: Data, *, vocab_size: int):
        self.tokenizer = tokenizer(data)
        if self.tokenizer.vocab_size > vocab_size:
            reason = f"is under the {self.tokenizer.vocab_size} tokens of data.tokenizer.kind={data.tokenizer.kind}"
            accepted = f"{self.tokenizer.vocab_size} or more, as the weights have it"
            raise ConfigError(Problem("model.vocab_size", reason, value=vocab_size, accepted=accepted))
        begin = self.tokenizer.bos if data.tokenizer.add_bos else None
        self._begin = [] if begin is None else [begin]
        self._names = {id: name for name, id in self.tokenizer.marks.items()}

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; ConfigError where there is none."""
        return chat_template(self.tokenizer)

    def of_text(self, text: str) -> list[int]:
        """Ids of plain text, after the begin token where documents were trained with one."""
        if not text:
            raise PromptError("the prompt is empty")
        _refuse_broken(text)
        return [*self._begin, *self.tokenizer.encode(text)]

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, up to where the assistant is to answer."""
        for message in messages:
            _refuse_broken(str(message.get("content")))
        try:
            text = self.template.prompt(messages)
        except UnclearError as error:
            raise PromptError(str(error)) from None
        return [int(id) for id in self.tokenizer.encode_marked(text)[0]]

    @cached_property
    def ends(self) -> frozenset[int]:
        """The end token, and the token with which the chat template ends a turn, which in many a model is another."""
        found = set() if self.tokenizer.eos is None else {self.tokenizer.eos}
        if self.has_template:
            try:
                rendered = self.template.render(
                    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
                )
                turn = rendered.text[slice(*rendered.turns[-1])] if rendered.turns else ""
                last = self.tokenizer.encode_marked(turn)[0][-1:]
                found |= {int(id) for id in last if int(id) in self.tokenizer.special}
            except UnclearError:
                # A template for conversations of another form: the end token alone ends an answer.
                pass
        return frozenset(found)

    def token_text(self, id: int) -> str:
        """A single token as text; the name of a special one."""
        return self._names.get(id) or self.tokenizer.decode([id])


def _refuse_broken(text: str) -> None:
    """JSON can hold half a character (a lone surrogate), which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt holds half a character at position {error.start}") from None
