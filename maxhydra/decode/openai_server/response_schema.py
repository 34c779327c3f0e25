"""Answers in OpenAI's form: whole, and as the chunks of a stream."""

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from maxhydra.decode.prompts import PromptEncoder
from maxhydra.decode.request import Completion, Delta, TokenLogprob


@dataclasses.dataclass(frozen=True)
class ResponseBuilder:
    """Makes the JSON of one request's answer; `prompts` turns token ids into text."""

    is_chat: bool
    model: str
    prompts: PromptEncoder
    prompt_tokens: int
    has_logprobs: bool
    include_usage: bool
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """All choices at once."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        written = sum(len(completion.tokens) for completion in completions)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._frame(kind), "choices": choices, "usage": self._usage(written)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins a choice; only a chat has one."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None) if self.is_chat else None

    def chunk(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """News of a choice, of which `offset` characters were sent before."""
        logprobs = self._logprobs(self._kept(delta.logprobs, delta.finish), offset)
        if not self.is_chat:
            return self._chunk(index, {"text": delta.text}, logprobs, delta.finish)
        content = {"content": delta.text} if delta.text or not delta.finish else {}
        return self._chunk(index, content, logprobs, delta.finish)

    def closing(self, written: int) -> list[Any]:
        """What ends a stream."""
        usage = {**self._frame(self._chunk_kind), "choices": [], "usage": self._usage(written)}
        return [usage, "[DONE]"] if self.include_usage else ["[DONE]"]

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _frame(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        content: dict[str, Any] = {"message": message} if self.is_chat else {"text": completion.text}
        logprobs = self._logprobs(self._kept(completion.logprobs, completion.finish), 0)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": completion.finish}

    def _chunk(self, index: int, content: Mapping[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        said = {"delta": content} if self.is_chat else content
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.include_usage else {}
        return {**self._frame(self._chunk_kind), "choices": [choice], **usage}

    def _usage(self, written: int) -> dict[str, int]:
        total = self.prompt_tokens + written
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": written, "total_tokens": total}

    def _kept(self, logprobs: Sequence[TokenLogprob], finish: str | None) -> Sequence[TokenLogprob]:
        """Without the end token, which is no part of the text."""
        if finish == "stop" and logprobs and logprobs[-1].token in self.prompts.ends:
            return logprobs[:-1]
        return logprobs

    def _logprobs(self, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        if self.is_chat:
            return {"content": [self._chat_logprob(drawn) for drawn in logprobs], "refusal": None}
        texts = [self.prompts.token_text(drawn.token) for drawn in logprobs]
        starts = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        return {
            "tokens": texts,
            "token_logprobs": [_finite(drawn.logprob) for drawn in logprobs],
            "top_logprobs": [
                {self.prompts.token_text(id): _finite(value) for id, value in drawn.alternatives} for drawn in logprobs
            ],
            "text_offset": starts,
        }

    def _chat_logprob(self, drawn: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(id, value) for id, value in drawn.alternatives]
        return {**self._entry(drawn.token, drawn.logprob), "top_logprobs": top}

    def _entry(self, id: int, value: float) -> dict[str, Any]:
        """A token that is part of a character has no text of its own, and its bytes are not told."""
        text = self.prompts.token_text(id)
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(value), "bytes": known}


def _finite(value: float) -> float:
    """JSON has no infinity; OpenAI writes this for a token that cannot be."""
    return max(value, -9999.0)
