"""/v1/responses: text and function calls, converted to and from a chat completion. Nothing is stored."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.decode.openai_server.fields import bad_field, get_typed
from maxhydra.decode.openai_server.request_schema import parse_object

# Fields that a chat request has too, and those whose only accepted values change nothing.
SHARED = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "user",
    "metadata",
    "safety_identifier",
    "seed",
    "stream",
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False, True),
    "background": (False,),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "include": ([],),
    "service_tier": ("auto", "default"),
    "stream_options": ({"include_obfuscation": False},),
}
TEXT_PARTS = ("input_text", "output_text", "text")


def to_chat_request(body: bytes) -> bytes:
    """Convert the body of a request to that of a chat request."""
    given = {name: value for name, value in parse_object(body).items() if value is not None}
    chat = {name: given[name] for name in SHARED if name in given}
    for name, value in given.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            accepted = " or ".join(json.dumps(each) for each in NEUTRAL[name]) or "null"
            raise bad_field(name, f"is not supported; accepted: {accepted}", code="unsupported_parameter")
        if name not in (
            *SHARED,
            *NEUTRAL,
            "input",
            "instructions",
            "max_output_tokens",
            "tools",
            "tool_choice",
            "text",
        ):
            raise bad_field(name[:100], "is an unknown field", code="unknown_parameter")
    system = [{"role": "system", "content": given["instructions"]}] if "instructions" in given else []
    source = given.get("input")
    if not isinstance(source, (str, list)) or not source:
        raise bad_field("input", "must be a non-empty string or list of items")
    items = [{"role": "user", "content": source}] if isinstance(source, str) else source
    chat["messages"] = system + [_to_message(f"input[{number}]", item) for number, item in enumerate(items)]
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = given["max_output_tokens"]
    if tools := get_typed(given, "tools", list, []):
        chat["tools"] = [_to_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
    choice = given.get("tool_choice", "auto")
    is_named = isinstance(choice, dict) and "name" in choice
    chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if is_named else choice
    if (format := get_typed(given, "text", dict, {}).get("format")) is not None:
        is_schema = isinstance(format, dict) and format.get("type") == "json_schema"
        chat["response_format"] = {"type": "json_schema", "json_schema": format} if is_schema else format
    return json.dumps(chat).encode()


def _to_message(path: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise bad_field(path, "is not a JSON object")
    kind = item.get("type", "message")
    if kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function"}
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if kind != "message":
        raise bad_field(f"{path}.type", "is not supported; accepted: message, function_call, function_call_output")
    content = item.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if not all(part.get("type") in TEXT_PARTS for part in parts):
            raise bad_field(f"{path}.content", f"has a part that is not text; accepted: {', '.join(TEXT_PARTS)}")
        content = [{"type": "text", "text": part.get("text")} for part in parts]
    return {"role": item.get("role"), "content": content}


def _to_tool(path: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_field(path, "is not supported; accepted: tools with type=function")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def to_response(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to a response."""
    (choice,), id = completion["choices"], completion["id"].removeprefix("chatcmpl-")
    message, status = choice["message"], status_after(choice["finish_reason"])
    output: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        output.append(text_item(id, "reasoning", reasoning))
    if message["content"] or not message.get("tool_calls"):
        output.append(text_item(id, "message", message["content"] or "", status=status))
    output += [call_item(id, number, call) for number, call in enumerate(message.get("tool_calls", []))]
    usage, created = completion["usage"], completion["created"]
    return response_of(id, created, completion["model"], output, status=status, usage=usage)


def status_after(finish: str | None) -> str:
    """The status of a response, and of its message, whose completion ended for this reason."""
    return "incomplete" if finish == "length" else "completed"


def text_item(id: str, kind: str, text: str | None, *, status: str = "completed") -> dict[str, Any]:
    """The message or the reasoning of a response; without a text, the item that a stream starts with."""
    if kind == "reasoning":
        content: list[Any] = [] if text is None else [{"type": "reasoning_text", "text": text}]
        return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content}
    content = [] if text is None else [{"type": "output_text", "text": text, "annotations": []}]
    status = "in_progress" if text is None else status
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status, "content": content}


def call_item(id: str, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """A function call of a response."""
    fields = {"call_id": call["id"], "status": "completed", **call["function"]}
    return {"id": f"fc_{number}_{id}", "type": "function_call", **fields}


def response_of(
    id: str,
    created: int,
    model: str,
    output: Sequence[Mapping[str, Any]],
    *,
    status: str,
    usage: Mapping[str, int] | None,
) -> dict[str, Any]:
    """A response with these items; `usage` is that of a chat completion, None while it is unknown."""
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": created,
        "model": model,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "error": None,
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage
        and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
