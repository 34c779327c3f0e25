"""Tool calls in an assistant turn: parsed from its text, in the format that the model's chat template defines.

| format | text of a call | published with |
|---|---|---|
| hermes | <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> | Hermes, Qwen 2.5, Qwen 3 |
| json | {"name": "f", "parameters": {"x": 1}}, optionally after <|python_tag|> | Llama 3.x |
| bracket | [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}], or [TOOL_CALLS]f[ARGS]{"x": 1} | Mistral |
| harmony | to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|> | gpt-oss |
| token | <｜tool▁call▁begin｜>function<｜tool▁sep｜>f and a JSON block, or f<｜tool▁sep｜>{"x": 1} | DeepSeek V3 |
| python | f(x=1) in a block that starts with ```tool_code | Gemma 3 |

The text contains the names of special tokens, except of the one that ended the turn.
"""

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from maxhydra.data.chat import Message

# A name and its arguments, or the reason why a call is invalid.
Call = tuple[str, dict[str, Any]] | str
Parsed = tuple[str, list[Call]]

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_TOKEN = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|$)", re.DOTALL)
_TOKENS = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>")
_NAMED = re.compile(r"\s*([\w.-]+)\s*\[ARGS\]\s*")
_CODE = re.compile(r"```tool_code\s*\n(.*?)(?:```|$)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_DECODER = json.JSONDecoder()


def parse_turn(text: str, format: str) -> Message:
    """The message of an assistant turn: `content`, and `tool_calls` or `invalid_tool_calls` if it has any."""
    content, calls = FORMATS[format](text)
    message: dict[str, Any] = {"role": "assistant", "content": content.strip()}
    valid = [call for call in calls if not isinstance(call, str)]
    if valid:
        # Ids of nine letters and digits, as Mistral's templates require.
        message["tool_calls"] = [
            {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(valid)
        ]
    if invalid := [call for call in calls if isinstance(call, str)]:
        message["invalid_tool_calls"] = invalid
    return message


def format_of(template: str) -> str:
    """The format that a template's source contains; hermes if it contains none."""
    return next((format for format, mark in MARKS.items() if mark in template), "hermes")


def _parse_hermes(text: str) -> Parsed:
    return _HERMES.sub("", text), [_json_call(found[1]) for found in _HERMES.finditer(text)]


def _parse_json(text: str) -> Parsed:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return text, []
    calls: list[Call] = []
    while body:
        try:
            value, end = _DECODER.raw_decode(body)
        except (ValueError, RecursionError) as error:
            calls.append(f"invalid JSON: {error}")
            break
        if not calls and not (isinstance(value, dict) and "name" in value):
            return text, []  # an answer in JSON
        calls.append(_call(value))
        body = body[end:].lstrip("; \n")
    return "", calls


def _parse_bracket(text: str) -> Parsed:
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for part in parts:
        if named := _NAMED.match(part):
            calls.append(_named_call(named[1], part[named.end() :]))
            continue
        try:
            values, _ = _DECODER.raw_decode(part.lstrip())
        except (ValueError, RecursionError) as error:
            calls.append(f"invalid JSON: {error}")
            continue
        calls += map(_call, values if isinstance(values, list) else [values])
    return content, calls


def _parse_harmony(text: str) -> Parsed:
    """Messages on channels: those to a function are calls, the others are content."""
    content: list[str] = []
    calls: list[Call] = []
    for part in text.split("<|start|>assistant"):
        header, _, body = part.partition("<|message|>")
        body = body.removesuffix("<|end|>").removesuffix("<|call|>").removesuffix("<|return|>")
        if recipient := _RECIPIENT.search(header):
            calls.append(_named_call(recipient[1], body))
        elif "<|channel|>analysis" not in header:
            content.append(body)
    return "\n".join(filter(None, content)), calls


def _parse_token(text: str) -> Parsed:
    calls: list[Call] = []
    for found in _TOKEN.finditer(text):
        first, _, rest = found[1].partition("<｜tool▁sep｜>")
        if first.strip() == "function":
            name, _, block = rest.partition("\n")
            calls.append(_named_call(name.strip(), block.strip().removeprefix("```json").removesuffix("```")))
        else:
            calls.append(_named_call(first.strip(), rest))
    return _TOKENS.sub("", _TOKEN.sub("", text)), calls


def _parse_python(text: str) -> Parsed:
    calls = [call for found in _CODE.finditer(text) for call in _python_calls(found[1])]
    return _CODE.sub("", text), calls


def _python_calls(source: str) -> Iterator[Call]:
    """The calls of a block of Python, one per line; print(f(x=1)) counts as f(x=1)."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield f"invalid Python: {error}"
        return
    for statement in statements:
        node = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
            node = node.args[0]
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            yield f"{ast.unparse(statement)[:200]} is not a call with keyword arguments"
            continue
        try:
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        except (ValueError, TypeError, RecursionError, MemoryError):
            yield f"{ast.unparse(statement)[:200]} has an argument that is not a literal"
            continue
        yield ast.unparse(node.func), arguments


def _json_call(text: str) -> Call:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"invalid JSON: {error}"


def _named_call(name: str, arguments: str) -> Call:
    try:
        return _call({"name": name, "arguments": _DECODER.raw_decode(arguments.strip())[0]})
    except (ValueError, RecursionError) as error:
        return f"invalid JSON: {error}"


def _call(value: Any) -> Call:
    """A call from its JSON; arguments may be encoded as JSON once more, as in the OpenAI API."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "a call needs a name and arguments"
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return (value["name"], arguments) if isinstance(arguments, dict) else "the arguments are not an object"


FORMATS: dict[str, Callable[[str], Parsed]] = {
    "hermes": _parse_hermes,
    "json": _parse_json,
    "bracket": _parse_bracket,
    "harmony": _parse_harmony,
    "token": _parse_token,
    "python": _parse_python,
}
# Text that only templates of a format contain.
MARKS = {
    "harmony": "<|channel|>",
    "token": "<｜tool▁call▁begin｜>",
    "bracket": "[TOOL_CALLS]",
    "hermes": "<tool_call>",
    "python": "```tool_code",
    "json": '"parameters"',
}
