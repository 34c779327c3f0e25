"""Typed access to the fields of a request body; an invalid one is an HttpError that names it."""

from collections.abc import Mapping
from typing import Any

from maxhydra.decode.openai_server.http11 import HttpError

KINDS = {bool: "true or false", dict: "an object", str: "a string", list: "a list"}


def bad_field(param: str, reason: str, *, code: str = "invalid_value") -> HttpError:
    """Return the error for an invalid request field."""
    return HttpError(400, f"{param} {reason}", param=param, code=code)


def get_typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of type bool, dict, str or list; the default if it is null or absent."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise bad_field(name, f"is not {KINDS[kind]}")
    return value


def get_integer(given: Mapping[str, Any], name: str, default: int, *, low: int, high: int) -> int:
    """Return an integer field within its bounds; the default if it is absent."""
    value = given.get(name, default)
    if type(value) is not int or not low <= value <= high:
        limit = f" (task.max_samples={high})" if name == "n" else ""
        raise bad_field(name, f"is not an integer from {low} to {high}{limit}")
    return value


def get_logit_bias(given: Mapping[str, Any], *, vocab_size: int, max_tokens: int) -> list[tuple[int, float]]:
    """Return token ids and biases of the field logit_bias, whose keys are ids as text."""
    bias: dict[str, Any] = get_typed(given, "logit_bias", dict, {})
    if len(bias) > max_tokens:
        raise bad_field("logit_bias", f"has {len(bias)} tokens; accepted: at most {max_tokens}")
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
            raise bad_field("logit_bias", f"has the key {token[:20]!r}; accepted: token ids from 0 to {vocab_size - 1}")
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise bad_field("logit_bias", f"of token {token} is not a number from -100 to 100")
    return [(int(token), float(value)) for token, value in bias.items()]
