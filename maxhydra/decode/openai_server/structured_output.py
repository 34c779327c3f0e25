"""The fields of a request that restrict its completion, as one grammar.

`response_format` is OpenAI's; `structured_outputs` and the `guided_` fields are those of vLLM.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from maxhydra.decode.grammar import GrammarError, json_grammar, lark_grammar, regex_grammar
from maxhydra.decode.openai_server.fields import bad_field, get_typed

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
STRUCTURED_FIELDS = ("response_format", "structured_outputs", *GUIDED)
FORMATS = ("text", "json_object", "json_schema")


def parse_grammar(given: Mapping[str, Any]) -> str:
    """Return the grammar of a request; empty if its completion is free. It is compiled later."""
    fields = [name for name in STRUCTURED_FIELDS if given.get(name) not in (None, {})]
    if len(fields) > 1:
        raise bad_field(fields[1], f"cannot be combined with {fields[0]}; send only one of the two")
    if not fields:
        return ""
    name = fields[0]
    try:
        if name == "response_format":
            return _parse_response_format(get_typed(given, name, dict, {}))
        if name == "structured_outputs":
            return _parse_structured(get_typed(given, name, dict, {}))
        return MAKERS[GUIDED[name]](name, given[name])
    except GrammarError as error:
        raise bad_field(name, f"is not available: {error}", code="unsupported_parameter") from None


def _parse_response_format(value: Mapping[str, Any]) -> str:
    kind = value.get("type")
    if kind not in FORMATS:
        raise bad_field("response_format.type", f"is not supported; accepted: {', '.join(FORMATS)}")
    if kind == "text":
        return ""
    if kind == "json_object":
        return json_grammar({"type": "object"})
    wrapped = value.get("json_schema")
    if not isinstance(wrapped, dict) or "schema" not in wrapped:
        raise bad_field("response_format.json_schema", "is not an object with the key schema")
    return _make_json("response_format.json_schema.schema", wrapped["schema"])


def _parse_structured(value: Mapping[str, Any]) -> str:
    given = {kind: each for kind, each in value.items() if each is not None}
    if len(given) != 1 or next(iter(given)) not in MAKERS:
        raise bad_field("structured_outputs", f"must have exactly one of the keys {', '.join(MAKERS)}")
    kind, content = next(iter(given.items()))
    return MAKERS[kind](f"structured_outputs.{kind}", content)


def _make_json(path: str, value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise bad_field(path, f"is not valid JSON: {error}") from None
    if isinstance(value, bool):
        value = {} if value else {"not": {}}
    if not isinstance(value, dict):
        raise bad_field(path, "is not a JSON schema")
    return json_grammar(value)


def _make_choice(path: str, value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise bad_field(path, "is not a non-empty list of strings")
    return regex_grammar("|".join(map(re.escape, value)))


def _from_text(make: Callable[[str], str]) -> Callable[[str, Any], str]:
    def make_checked(path: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise bad_field(path, "is not a non-empty string")
        return make(value)

    return make_checked


MAKERS: dict[str, Callable[[str, Any], str]] = {
    "json": _make_json,
    "regex": _from_text(regex_grammar),
    "choice": _make_choice,
    "grammar": _from_text(lark_grammar),
}
