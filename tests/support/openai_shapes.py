"""Strict comparison of JSON with the models of OpenAI's client, which otherwise accept unknown fields."""

import typing
from collections.abc import Iterator
from typing import Any

import pydantic

from tests.support.skips import import_optional

openai = import_optional("openai", extra="test")

# Fields of other servers (DeepSeek, vLLM) that OpenAI's models lack.
EXTENSIONS = {"reasoning_content"}


def check_event(value: Any) -> None:
    """Fail if an event of /v1/responses is not one of OpenAI's."""
    union = typing.get_args(openai.types.responses.ResponseStreamEvent)[0]
    models = {typing.get_args(each.model_fields["type"].annotation)[0]: each for each in typing.get_args(union)}
    check_shape(models[value["type"]], value)


def check_shape(model: Any, value: Any) -> None:
    """Fail if a required field is missing, a value has another type, or a field is unknown."""
    parsed = pydantic.TypeAdapter(model).validate_python(value)
    unknown = {path for path, name in _extra_fields(parsed, "") if name not in EXTENSIONS}
    assert not unknown, f"{model} has no {', '.join(sorted(unknown))}"


def _extra_fields(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, pydantic.BaseModel):
        yield from ((f"{path}.{name}", name) for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from _extra_fields(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _extra_fields(item, f"{path}[{number}]")
