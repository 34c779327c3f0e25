"""Builds OpenAI responses: complete, and as chunks of a stream."""

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from maxhydra.data.turn_parser import TurnParser
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.request_schema import CompletionRequest
from maxhydra.decode.request import Completion, Delta, TokenLogprob
from maxhydra.decode.sampling_params import PromptEncoder

# Stands for the text and the finish reason in the frame of a chunk.
FRAME = "\u241f"
encode_text = json.JSONEncoder(ensure_ascii=False).encode


@dataclasses.dataclass(frozen=True)
class ResponseBuilder:
    """Builds the JSON of one response; `prompts` converts token ids into text."""

    is_chat: bool
    model: str
    prompts: PromptEncoder
    prompt_tokens: int
    has_logprobs: bool
    include_usage: bool
    has_prompts: bool = False
    """Choices start with their prompts."""
    parsers: Sequence[TurnParser] = ()
    """Parsers of the choices of a chat; none if their text is all content."""
    max_calls: int | None = None
    """Tool calls of a choice that are returned; None: all."""
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def response(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the complete response."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        num_tokens = sum(len(completion.tokens) for completion in completions)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._envelope(kind), "choices": choices, "usage": self.usage(num_tokens)}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return the first chunk of a choice; none unless it is a chat."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None, None)] if self.is_chat else []

    def chunks(self, index: int, delta: Delta, offset: int) -> list[str]:
        """Return the chunk for a delta as JSON, if it has content."""
        text = self.chunk_text(index, delta, offset)
        return [text] if text else []

    def failure(self, error: HttpError) -> dict[str, Any]:
        """Return the event that ends a stream whose request failed."""
        return error.body()

    def chunk(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """Return the chunk for a delta; `offset` characters of the choice were sent before."""
        logprobs = self._logprobs(self._without_eos(delta.logprobs, delta.finish), offset)
        if not self.is_chat:
            return self._chunk(index, {"text": delta.text}, logprobs, delta.finish)
        content = {"content": delta.text} if delta.text or not delta.finish else {}
        return self._chunk(index, content, logprobs, delta.finish)

    def chunk_text(self, index: int, delta: Delta, offset: int) -> str:
        """The same chunk as JSON, empty if it has no content yet.

        Without log-probabilities only text and finish reason are encoded each time.
        """
        if self.parsers:
            return self._parsed_chunk(index, delta)
        if self.has_logprobs or (self.is_chat and not delta.text):
            return json.dumps(self.chunk(index, delta, offset), ensure_ascii=False)
        before, after = self._chunk_frame
        finish = "null" if delta.finish is None else f'"{delta.finish}"'
        return f"{before[0]}{index}{before[1]}{encode_text(delta.text)}{after[0]}{finish}{after[1]}"

    @cached_property
    def _chunk_frame(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The JSON of a chunk around index, text and finish reason."""
        chunk = json.dumps(self.chunk(0, Delta(FRAME, (), finish=FRAME), 0), ensure_ascii=False)
        head, middle, tail = chunk.split(f'"{FRAME}"')
        start, index, rest = head.partition('"index": ')
        return (start + index, rest.removeprefix("0")), (middle, tail)

    def closing(self, num_tokens: int) -> list[Any]:
        """Return the events that end a stream."""
        usage = {**self._envelope(self._chunk_kind), "choices": [], "usage": self.usage(num_tokens)}
        return [usage, "[DONE]"] if self.include_usage else ["[DONE]"]

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _envelope(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self.parsers:
            parts, finish = self.parts(index, completion.text, completion.finish)
            completion = dataclasses.replace(completion, finish=finish or "")
            calls = [{key: value for key, value in call.items() if key != "index"} for call in parts["tool_calls"]]
            content_text = parts["content"].strip() if calls else parts["content"]
            message |= {"content": content_text or None if calls or parts["reasoning_content"] else content_text}
            others = {"tool_calls": calls, "reasoning_content": parts["reasoning_content"]}
            message |= {key: value for key, value in others.items() if value}
        content: dict[str, Any] = {"message": message} if self.is_chat else {"text": completion.text}
        logprobs = self._logprobs(self._without_eos(completion.logprobs, completion.finish), 0)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": completion.finish}

    def _parsed_chunk(self, index: int, delta: Delta) -> str:
        parts, finish = self.parts(index, delta.text, delta.finish)
        content = {key: value for key, value in parts.items() if value}
        logprobs = self._logprobs(self._without_eos(delta.logprobs, delta.finish), 0)
        if not content and not finish and not delta.logprobs:
            return ""
        return json.dumps(self._chunk(index, content, logprobs, finish), ensure_ascii=False)

    def parts(self, index: int, text: str, finish: str | None) -> tuple[dict[str, Any], str | None]:
        """Return new content, reasoning and calls of a choice, and its finish reason."""
        if not self.parsers:
            return {"content": text, "reasoning_content": "", "tool_calls": []}, finish
        parser = self.parsers[index]
        first = parser.num_calls
        pieces = parser.add(text, is_last=finish is not None)
        calls = [piece for piece in pieces if piece.kind == "call"]
        made = [
            {
                "index": number,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for number, call in enumerate(calls, first)
            if self.max_calls is None or number < self.max_calls
        ]
        texts = {
            name: "".join(piece.text for piece in pieces if piece.kind == kind)
            for name, kind in (("content", "content"), ("reasoning_content", "reasoning"))
        }
        return {**texts, "tool_calls": made}, "tool_calls" if finish == "stop" and parser.num_calls else finish

    def _chunk(self, index: int, content: Mapping[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        payload = {"delta": content} if self.is_chat else content
        choice = {"index": index, **payload, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.include_usage else {}
        return {**self._envelope(self._chunk_kind), "choices": [choice], **usage}

    def usage(self, num_tokens: int) -> dict[str, int]:
        """Return the numbers of tokens of the response."""
        total = self.prompt_tokens + num_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": num_tokens, "total_tokens": total}

    def _without_eos(self, logprobs: Sequence[TokenLogprob], finish: str | None) -> Sequence[TokenLogprob]:
        """Drop the EOS token, which is not part of the text.

        With a prompt it stays: clients that score prompts cut off the sampled token, whichever it is.
        """
        if finish == "stop" and not self.has_prompts and logprobs and logprobs[-1].token in self.prompts.eos_ids:
            return logprobs[:-1]
        return logprobs

    def _logprobs(self, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        if self.is_chat:
            return {"content": [self._chat_logprob(entry) for entry in logprobs], "refusal": None}
        texts = [self.prompts.token_text(entry.token) for entry in logprobs]
        starts = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [None if math.isnan(entry.logprob) else self._alternatives(entry) for entry in logprobs],
            "text_offset": starts,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, Any]:
        """The most likely tokens by text; of tokens with the same text, such as parts of characters, the likeliest."""
        return {self.prompts.token_text(id): _finite(value) for id, value in reversed(entry.alternatives)}

    def _chat_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(id, value) for id, value in entry.alternatives]
        return {**self._entry(entry.token, entry.logprob), "top_logprobs": top}

    def _entry(self, id: int, value: float) -> dict[str, Any]:
        """Return one log-probability; `bytes` is null for a token that is only part of a character."""
        text = self.prompts.token_text(id)
        utf8 = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(value), "bytes": utf8}


def echo_prompt(delta: Delta, request: CompletionRequest, prompts: PromptEncoder, number: int, ids: list[int]) -> Delta:
    """Put prompt `number` of a request, with its log-probabilities if requested, before the first delta of a choice."""
    given = request.prompts[number] if request.prompts else ids
    text = given if isinstance(given, str) else prompts.tokenizer.decode(ids)
    # The first token of a prompt has no log-probability.
    logprobs = () if request.logprobs is None else (TokenLogprob(ids[0], math.nan, ()), *delta.prompt_logprobs)
    if request.is_prompt_only and delta.finish in ("stop", "length"):
        return Delta(text, (), logprobs, "length")
    return dataclasses.replace(delta, text=text + delta.text, logprobs=(*logprobs, *delta.logprobs))


def _finite(value: float) -> float | None:
    """Replace values that JSON lacks: -inf by the value that OpenAI uses for impossible tokens, NaN by null."""
    return None if math.isnan(value) else max(value, -9999.0)
