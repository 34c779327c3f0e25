"""Encodes prompts and conversations as token ids, and knows the tokens that end a completion."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.data import load_tokenizer
from maxhydra.data.chat import ChatTemplate, ChatTemplateError, compile_chat_template


class PromptError(ValueError):
    """A prompt that cannot be encoded; the message says why."""


class PromptEncoder:
    """Encodes prompts with the tokenizer and chat template of a run. Thread-safe."""

    def __init__(self, data: Data, *, vocab_size: int):
        self.tokenizer = load_tokenizer(data)
        if self.tokenizer.vocab_size > vocab_size:
            reason = (
                f"is smaller than the {self.tokenizer.vocab_size} tokens of data.tokenizer.kind={data.tokenizer.kind}"
            )
            accepted = f"{self.tokenizer.vocab_size} or more; use the vocabulary size of the weights"
            raise ConfigError(Problem("model.vocab_size", reason, value=vocab_size, accepted=accepted))
        bos = self.tokenizer.bos if data.tokenizer.add_bos else None
        self._bos = [] if bos is None else [bos]
        self._names = {id: name for name, id in self.tokenizer.special_token_ids.items()}

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; ConfigError if the tokenizer has none."""
        return compile_chat_template(self.tokenizer)

    def encode_text(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Encode plain text, with a BOS token if data.tokenizer.add_bos is set.

        A text that cannot fit into `max_tokens` is rejected without tokenizing it.
        """
        if not text:
            raise PromptError("the prompt is empty")
        _reject_surrogates(text)
        self._check_length(text, max_tokens)
        return [*self._bos, *self.tokenizer.encode(text)]

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> list[int]:
        """Encode a conversation up to the beginning of the next assistant turn; `max_tokens` as for `encode_text`."""
        for message in messages:
            _reject_surrogates(str(message.get("content")))
        try:
            text = self.template.prompt(messages)
        except ChatTemplateError as error:
            raise PromptError(str(error)) from None
        self._check_length(text, max_tokens)
        ids: list[int] = self.tokenizer.encode_with_special_tokens(text)[0].tolist()
        return ids

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        longest = self.tokenizer.max_token_bytes
        if max_tokens is not None and longest is not None and len(text) > max_tokens * longest:
            raise PromptError(
                f"the prompt has {len(text)} characters, more than fit into {max_tokens} tokens: shorten it, or raise "
                "task.engine.max_context"
            )

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """EOS, and the token with which the chat template ends a turn, which differs from EOS in many models."""
        ids = set() if self.tokenizer.eos is None else {self.tokenizer.eos}
        if self.has_template:
            try:
                rendered = self.template.render(
                    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
                )
                turn = rendered.text[slice(*rendered.turns[-1])] if rendered.turns else ""
                last = self.tokenizer.encode_with_special_tokens(turn)[0][-1:]
                ids |= {int(id) for id in last if int(id) in self.tokenizer.special}
            except ChatTemplateError:
                # The template rejects this simple conversation: only EOS ends a completion.
                pass
        return frozenset(ids)

    def token_text(self, id: int) -> str:
        """Return a single token as text, or the name of a special token."""
        return self._names.get(id) or self.tokenizer.decode([id])


def _reject_surrogates(text: str) -> None:
    """Reject lone surrogates, which JSON can contain and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt has an unpaired surrogate at position {error.start}") from None
