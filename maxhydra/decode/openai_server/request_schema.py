"""What a request body may say, in OpenAI's words, as the settings and prompts it stands for.

Nothing that would change an answer is passed over: a field that is not served is refused, unless it has a value that
asks for nothing.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from maxhydra.config.errors import did_you_mean
from maxhydra.config.schema.decode import Sampling
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.sampling_params import SettingError, adjusted

# Fields that are the settings of the same name (the last four are not OpenAI's).
SETTINGS = ("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos")
# Fields that say nothing about the answer.
IDLE = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
# Fields that are not served, and the values with which they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
NEUTRAL_TEXT: dict[str, tuple[Any, ...]] = {**NEUTRAL, "echo": (False,), "suffix": ("",), "best_of": (1,)}
SERVED = ("model", "n", "stop", "stream", "stream_options", "logprobs", "max_tokens", *SETTINGS)
SERVED_CHAT = (*SERVED, "messages", "max_completion_tokens", "top_logprobs")
SERVED_TEXT = (*SERVED, "prompt")
MOST_LOGPROBS = 20
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

Prompt = str | list[int]


@dataclasses.dataclass(frozen=True)
class ServerDefaults:
    """What the server has to give: the model's name, the settings a request leaves out, the most sequences of one."""

    model: str
    sampling: Sampling
    max_samples: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A request that is in order. `messages` of a chat, else `prompts`."""

    messages: list[dict[str, str]]
    prompts: list[Prompt]
    samples: int
    sampling: Sampling
    logprobs: int | None
    stream: bool
    include_usage: bool

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def sequences(self) -> int:
        return self.samples * max(1, len(self.prompts))


def wrong(param: str, reason: str, *, code: str = "invalid_value") -> HttpError:
    return HttpError(400, f"{param} {reason}", param=param, code=code)


def parse(body: bytes, offer: ServerDefaults, *, is_chat: bool) -> CompletionRequest:
    """The request in a body; HttpError with status 400 (404 for another model) names the field that is wrong."""
    values = _object(body)
    _refuse_unknown(values, is_chat=is_chat)
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("model", offer.model) != offer.model:
        reason = f"no model {str(given['model'])[:100]!r} is served here; accepted: {offer.model!r}"
        raise HttpError(404, reason, param="model", code="model_not_found")
    options = _typed(given, "stream_options", dict, {})
    if unknown := set(options) - {"include_usage"}:
        raise wrong("stream_options", f"has unknown keys: {', '.join(sorted(map(str, unknown)))[:200]}")
    asked = CompletionRequest(
        messages=_messages(given) if is_chat else [],
        prompts=[] if is_chat else _prompts(given, offer.vocab_size),
        samples=_integer(given, "n", 1, low=1, high=offer.max_samples),
        sampling=_sampling(given, offer.sampling),
        logprobs=_chat_logprobs(given) if is_chat else _text_logprobs(given),
        stream=_typed(given, "stream", bool, False),
        include_usage=_typed(options, "include_usage", bool, False),
    )
    if options and not asked.stream:
        raise wrong("stream_options", "is only of use with stream=true")
    if asked.sequences > offer.max_samples:
        reason = f"times n asks for {asked.sequences} answers; accepted: at most task.max_samples={offer.max_samples}"
        raise wrong("prompt", reason)
    return asked


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise HttpError(400, "the body is no JSON object", code="invalid_json")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _refuse_unknown(values: Mapping[str, Any], *, is_chat: bool) -> None:
    served = SERVED_CHAT if is_chat else SERVED_TEXT
    neutral = NEUTRAL_CHAT if is_chat else NEUTRAL_TEXT
    for name, value in values.items():
        if name in served or name in IDLE:
            continue
        if name not in neutral:
            hint = did_you_mean(name[:100], [*served, *neutral])
            raise wrong(name[:100], f"is not known here; {hint}".rstrip("; "), code="unknown_parameter")
        if value is not None and value not in neutral[name]:
            accepted = " or ".join(json.dumps(each) for each in neutral[name])
            raise wrong(name, f"is not served; accepted: {accepted}, or leave it out", code="unsupported_parameter")


def _sampling(given: Mapping[str, Any], defaults: Sampling) -> Sampling:
    changes = {name: given[name] for name in SETTINGS if name in given}
    limits = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(set(map(str, limits.values()))) > 1:
        raise wrong("max_completion_tokens", "differs from max_tokens; keep one of the two")
    name = next(iter(limits), "max_tokens")
    changes |= {"max_tokens": limits[name]} if limits else {}
    if "stop" in given:
        stop = given["stop"]
        if not isinstance(stop, (str, list)):
            raise wrong("stop", "is neither text nor a list of texts")
        changes["stop"] = [stop] if isinstance(stop, str) else stop
    try:
        return adjusted(defaults, changes)
    except SettingError as error:
        told = name if error.name == "max_tokens" else error.name
        raise wrong(told, error.reason + (f"; accepted: {error.accepted}" if error.accepted else "")) from None


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    count = _integer(given, "top_logprobs", 0, low=0, high=MOST_LOGPROBS)
    if _typed(given, "logprobs", bool, False):
        return count
    if "top_logprobs" in given and count:
        raise wrong("top_logprobs", "needs logprobs=true")
    return None


def _text_logprobs(given: Mapping[str, Any]) -> int | None:
    return _integer(given, "logprobs", 0, low=0, high=MOST_LOGPROBS) if "logprobs" in given else None


def _messages(given: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "is needed: a list of messages, at least one")
    return [_message(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise wrong(where, "is no object")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", f"is not served; accepted: {', '.join(ROLES)}")
    if extra := [str(key)[:50] for key, value in message.items() if key not in ("role", "content") and value]:
        raise wrong(f"{where}.{extra[0]}", "is not served", code="unsupported_parameter")
    return {"role": ROLES[role], "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: Any) -> str:
    """Text, or a list of parts that are all text."""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong(where, "is neither text nor a list of parts of type text")
    return "".join(part["text"] for part in parts)


def _prompts(given: Mapping[str, Any], vocab_size: int) -> list[Prompt]:
    """A text, texts, token ids, or lists of token ids."""
    prompt = given.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not prompts or not all(isinstance(each, str) or _is_ids(each) for each in prompts):
        raise wrong("prompt", "is needed: a text, a list of texts, token ids, or lists of token ids")
    for each in prompts:
        if not each:
            raise wrong("prompt", "is empty")
        if not isinstance(each, str) and not all(0 <= id < vocab_size for id in each):
            raise wrong("prompt", f"holds a token id that is not from 0 to {vocab_size - 1}")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise wrong(name, f"is not {'true or false' if kind is bool else 'an object'}")
    return value


def _integer(given: Mapping[str, Any], name: str, default: int, *, low: int, high: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or not low <= value <= high:
        limit = f" (task.max_samples={high})" if name == "n" else ""
        raise wrong(name, f"is not an integer from {low} to {high}{limit}")
    return value
