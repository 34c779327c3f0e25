"""Parses OpenAI request bodies into sampling parameters and prompts.

No field that would change a completion is silently ignored: an unsupported field is rejected unless its value is
neutral.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from maxhydra.config import ConfigError
from maxhydra.config.errors import did_you_mean
from maxhydra.config.schema.decode import Sampling
from maxhydra.decode.openai_server.fields import bad_field, get_integer, get_logit_bias, get_typed
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.messages import (
    Message,
    Tools,
    parse_audios,
    parse_images,
    parse_messages,
    parse_tool_choice,
    parse_tools,
)
from maxhydra.decode.openai_server.structured_output import STRUCTURED_FIELDS, parse_grammar
from maxhydra.decode.request import MAX_BIAS
from maxhydra.decode.sampling_params import MediaPrompt, PromptEncoder, PromptError, SettingError, with_overrides

# Fields that map to the sampling parameter of the same name (the last four are extensions of OpenAI's API).
OPENAI_FIELDS = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty")
SAMPLING_FIELDS = (*OPENAI_FIELDS, "top_k", "min_p", "repetition_penalty", "ignore_eos")
# Fields that are ignored because they cannot change a completion.
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
# Unsupported fields, and the neutral values that are accepted for them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}
NEUTRAL_TEXT: dict[str, tuple[Any, ...]] = {**NEUTRAL, "suffix": ("",), "best_of": (1,)}
COMMON_FIELDS = ("model", "n", "stop", "stream", "stream_options", "logprobs", "max_tokens", "logit_bias")
SUPPORTED = (*COMMON_FIELDS, *SAMPLING_FIELDS, *STRUCTURED_FIELDS)
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
SUPPORTED_CHAT = (*SUPPORTED, "messages", "max_completion_tokens", "top_logprobs", *TOOL_FIELDS)
SUPPORTED_TEXT = (*SUPPORTED, "prompt", "echo")
MAX_LOGPROBS = 20
# Values and keys of a body: json.loads, which lets no other thread run, takes 30 ms for so many. All token ids of a
# prompt are values.
MAX_VALUES, MAX_KEYS = 2**18, 2**15

Prompt = str | list[int]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ServerDefaults:
    """Model name, default sampling parameters and limits of the server."""

    model: str
    sampling: Sampling
    max_samples: int
    """Maximum number of sequences per request."""
    vocab_size: int
    max_context: int
    """Maximum length of prompt plus completion."""
    has_adapters: bool = False
    """Whether a request may name an adapter as its model; the engine knows their names."""


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A valid request: a chat has `messages`, or one prompt of token ids once it is encoded; others have `prompts`."""

    is_chat: bool
    messages: list[Message]
    prompts: list[Prompt]
    samples: int
    sampling: Sampling
    logprobs: int | None
    stream: bool
    include_usage: bool
    adapter: str | None = None
    """Name of an adapter; None: the model itself."""
    logit_bias: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    echo: bool = False
    """The completion starts with the prompt."""
    is_prompt_only: bool = False
    """The prompt is all that is returned: echo with max_tokens=0."""
    grammar: str = ""
    """What the completion must match; empty: anything."""
    tools: Tools = dataclasses.field(default_factory=list)
    is_call_required: bool = False
    """The completion is a JSON list of calls."""
    max_calls: int | None = None
    """Calls of a turn that are returned; None: all."""
    images: list[Any] = dataclasses.field(default_factory=list)
    """Data URLs of the images of the messages, in order; {"video": URL} for videos."""
    audios: list[str] = dataclasses.field(default_factory=list)
    """Data URLs of the audio clips of the messages, in order."""

    @property
    def sequences(self) -> int:
        return self.samples * max(1, len(self.prompts))


def parse(body: bytes, defaults: ServerDefaults, *, is_chat: bool) -> CompletionRequest:
    """Parse a body; HttpError with status 400 (404 for an unknown model) names the invalid field.

    Lengths are checked before items, so that the work is bounded whatever a client sends.
    """
    try:
        return _parse_request(parse_object(body), defaults, is_chat=is_chat)
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply", code="invalid_json") from None


def encode_prompts(request: CompletionRequest, encoder: PromptEncoder, max_context: int) -> list[list[int]]:
    """The prompts of a request as token ids; HttpError names the invalid field."""
    tools = request.tools

    def encode() -> list[list[int]]:
        if request.messages:
            return [encoder.encode_messages(request.messages, tools=tools, max_tokens=max_context)]
        return [
            encoder.encode_text(each, max_tokens=max_context) if isinstance(each, str) else each
            for each in request.prompts
        ]

    return encode_with("messages" if request.is_chat else "prompt", encode)


def insert_media(request: CompletionRequest, prompts: Sequence[list[int]], encoder: PromptEncoder) -> MediaPrompt:
    """The prompt of a chat with the tokens of its images and audio clips; HttpError names the invalid field."""
    (prompt,) = prompts
    try:
        return encoder.insert_media(prompt, images=request.images, audios=request.audios)
    except PromptError as error:
        raise bad_field("messages", f"has an invalid {'audio clip' if request.audios else 'image'}: {error}") from None


def encode_with(field: str, encode: Callable[[], T]) -> T:
    """What `encode` returns; HttpError names the field whose text it cannot encode."""
    try:
        return encode()
    except PromptError as error:
        raise bad_field(field, f"is invalid: {error}") from None
    except ConfigError as error:
        # The tokenizer has no chat template, or fails on this text.
        raise bad_field(field, f"is invalid: {error.problems[0]}") from None


def check_model(given: Mapping[str, Any], defaults: ServerDefaults) -> str:
    """Return the model that a request names; HttpError if it is not available."""
    model = given.get("model", defaults.model)
    if model == defaults.model or (defaults.has_adapters and isinstance(model, str)):
        return model
    name = model[:100] if isinstance(model, str) else type(model).__name__
    reason = f"model {name!r} is not available; accepted: {defaults.model!r}"
    raise HttpError(404, reason, param="model", code="model_not_found")


def _parse_request(values: dict[str, Any], defaults: ServerDefaults, *, is_chat: bool) -> CompletionRequest:
    _reject_unsupported(values, is_chat=is_chat)
    given = {name: value for name, value in values.items() if value is not None}
    model, samples = check_model(given, defaults), defaults.max_samples
    options = get_typed(given, "stream_options", dict, {})
    if unknown := set(options) - {"include_usage"}:
        raise bad_field("stream_options", f"has the unknown key {min(unknown)[:100]!r}")
    echo = get_typed(given, "echo", bool, False)
    is_prompt_only = echo and type(given.get("max_tokens")) is int and given["max_tokens"] == 0
    if is_prompt_only:
        given["max_tokens"] = 1
    tools = parse_tools(given) if is_chat else []
    calls_grammar, grammar = parse_tool_choice(given, tools) if is_chat else "", parse_grammar(given)
    if calls_grammar and grammar:
        raise bad_field("tool_choice", "that requires a call cannot be combined with another structured output")
    request = CompletionRequest(
        is_chat=is_chat,
        messages=parse_messages(given) if is_chat else [],
        prompts=[] if is_chat else parse_prompts(given, defaults, most=samples, limit=f"task.max_samples={samples}"),
        samples=get_integer(given, "n", 1, low=1, high=defaults.max_samples),
        sampling=_parse_sampling(given, defaults.sampling),
        logprobs=_parse_chat_logprobs(given) if is_chat else _parse_text_logprobs(given),
        stream=get_typed(given, "stream", bool, False),
        include_usage=get_typed(options, "include_usage", bool, False),
        adapter=None if model == defaults.model else model,
        logit_bias=get_logit_bias(given, vocab_size=defaults.vocab_size, max_tokens=MAX_BIAS),
        echo=echo,
        is_prompt_only=is_prompt_only,
        grammar=calls_grammar or grammar,
        tools=tools,
        is_call_required=bool(calls_grammar),
        max_calls=None if get_typed(given, "parallel_tool_calls", bool, True) else 1,
        images=parse_images(given) if is_chat else [],
        audios=parse_audios(given) if is_chat else [],
    )
    if options and not request.stream:
        raise bad_field("stream_options", "requires stream=true")
    if request.sequences > defaults.max_samples:
        reason = f"times n is {request.sequences} sequences; accepted: at most task.max_samples={defaults.max_samples}"
        raise bad_field("prompt", reason)
    return request


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that is a JSON object, of a bounded number of values."""
    _check_size(body)
    try:
        values = DECODER.decode(body.decode())
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise HttpError(400, "the body is not a JSON object", code="invalid_json")
    return values


def _check_size(body: bytes) -> None:
    """Reject a body with too many values, before any of them is made."""
    if len(body) <= MAX_KEYS or (_count(body, b",[{") <= MAX_VALUES and _count(body, b":") <= MAX_KEYS):
        return
    # Most of these characters may be in a text: count again without texts, which end at a quote that is not escaped.
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_texts = _count(body, b'"') // 2
    outside = b"".join(body.split(b'"')[::2]) if num_texts <= MAX_VALUES + MAX_KEYS else b""
    num_values, num_keys = _count(outside, b",[{"), _count(outside, b":")
    if num_texts > MAX_VALUES + MAX_KEYS or num_values > MAX_VALUES or num_keys > MAX_KEYS:
        reason = f"the body has too many values; accepted: at most {MAX_VALUES} values and {MAX_KEYS} keys"
        raise HttpError(400, reason, code="too_many_values")


def _count(data: bytes, characters: bytes) -> int:
    # Ten times as fast as bytes.count, and other threads can run meanwhile.
    view = np.frombuffer(data, np.uint8)
    return sum(int(np.count_nonzero(view == character)) for character in characters)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


# Made once: json.loads would make one for every body.
DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _reject_unsupported(values: Mapping[str, Any], *, is_chat: bool) -> None:
    supported = SUPPORTED_CHAT if is_chat else SUPPORTED_TEXT
    neutral = NEUTRAL_CHAT if is_chat else NEUTRAL_TEXT
    for name, value in values.items():
        if name in supported or name in IGNORED:
            continue
        if name not in neutral:
            hint = did_you_mean(name[:100], [*supported, *neutral])
            raise bad_field(name[:100], f"is an unknown field; {hint}".rstrip("; "), code="unknown_parameter")
        if value is not None and value not in neutral[name]:
            accepted = " or ".join(json.dumps(each) for each in neutral[name])
            raise bad_field(name, f"is not supported; accepted: {accepted}, or omit it", code="unsupported_parameter")


def _parse_sampling(given: Mapping[str, Any], defaults: Sampling) -> Sampling:
    changes = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    limits = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(limits) > 1 and limits["max_tokens"] != limits["max_completion_tokens"]:
        raise bad_field("max_completion_tokens", "differs from max_tokens; send only one of the two")
    name = next(iter(limits), "max_tokens")
    changes |= {"max_tokens": limits[name]} if limits else {}
    if "stop" in given:
        stop = given["stop"]
        if not isinstance(stop, (str, list)):
            raise bad_field("stop", "is neither a string nor a list of strings")
        changes["stop"] = [stop] if isinstance(stop, str) else stop
    try:
        return with_overrides(defaults, changes)
    except SettingError as error:
        field = name if error.name == "max_tokens" else error.name
        raise bad_field(field, error.reason + (f"; accepted: {error.accepted}" if error.accepted else "")) from None


def _parse_chat_logprobs(given: Mapping[str, Any]) -> int | None:
    count = get_integer(given, "top_logprobs", 0, low=0, high=MAX_LOGPROBS)
    if get_typed(given, "logprobs", bool, False):
        return count
    if "top_logprobs" in given and count:
        raise bad_field("top_logprobs", "requires logprobs=true")
    return None


def _parse_text_logprobs(given: Mapping[str, Any]) -> int | None:
    return get_integer(given, "logprobs", 0, low=0, high=MAX_LOGPROBS) if "logprobs" in given else None


def parse_prompts(
    given: Mapping[str, Any], defaults: ServerDefaults, *, field: str = "prompt", most: int, limit: str
) -> list[Prompt]:
    """Return up to `most` prompts, given as a string, a list of strings, token ids, or lists of token ids."""
    prompt, vocab_size = given.get(field), defaults.vocab_size
    prompts: list[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if len(prompts) > most:
        raise bad_field(field, f"has {len(prompts)} prompts; accepted: at most {limit}")
    if not prompts or not all(isinstance(each, str) or _is_ids(each) for each in prompts):
        raise bad_field(field, "must be a string, a list of strings, token ids, or lists of token ids")
    for each in prompts:
        if not each:
            raise bad_field(field, "is empty")
        if not isinstance(each, str) and len(each) >= defaults.max_context:
            reason = f"has {len(each)} tokens, more than task.engine.max_context={defaults.max_context} allows"
            raise bad_field(field, reason)
        if not isinstance(each, str) and not all(0 <= id < vocab_size for id in each):
            raise bad_field(field, f"contains a token id outside 0 to {vocab_size - 1}")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)
