"""Parses the messages and tools of a chat request."""

import json
from collections.abc import Mapping
from typing import Any

from maxhydra.data.audio.tokens import CLIP_MARKER
from maxhydra.data.image_tokens import MARKER
from maxhydra.decode.grammar import GrammarError, json_grammar
from maxhydra.decode.openai_server.fields import bad_field, get_typed

# Types of parts with a URL -> medium, and prefixes of accepted URLs.
VISUAL_TYPES = {"image_url": ("image", ("data:image/",)), "video_url": ("video", ("data:video/", "data:image/"))}
MAX_MESSAGES, MAX_TOOLS, MAX_IMAGES, MAX_CLIPS = 4096, 512, 64, 64
AUDIO_FORMATS = ("wav", "flac")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Keys of a message besides role and content; the last two are those that reasoning models return.
KEYS = {"assistant": ("tool_calls", "name", "reasoning_content", "refusal"), "tool": ("tool_call_id", "name")}
CHOICES = ("none", "auto", "required")

Message = dict[str, Any]
Tools = list[dict[str, Any]]


def parse_messages(given: Mapping[str, Any]) -> list[Message]:
    """Return the messages in the form that chat templates expect."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "must be a non-empty list of messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_field("messages", f"has {len(messages)} messages; accepted: at most {MAX_MESSAGES}")
    return [_parse_message(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _parse_message(path: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise bad_field(path, "is not a JSON object")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_field(f"{path}.role", f"is not supported; accepted: {', '.join(ROLES)}")
    allowed = ("role", "content", *KEYS.get(role, ()))
    if extra := [str(key)[:50] for key, value in message.items() if key not in allowed and value]:
        raise bad_field(f"{path}.{extra[0]}", "is not supported", code="unsupported_parameter")
    parsed: Message = {"role": ROLES[role]}
    content = message.get("content")
    calls = message.get("tool_calls")
    parsed["content"] = "" if content is None and calls else _parse_content(f"{path}.content", content)
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(value := message.get(key), str) and key in allowed:
            parsed[key] = value
    if calls:
        parsed["tool_calls"] = _parse_calls(f"{path}.tool_calls", calls)
    return parsed


def _parse_content(path: str, content: Any) -> str:
    """Return the text of a message, given as a string or a list of text and media parts, which become markers."""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    return "".join(_parse_part(path, part) for part in parts)


def _parse_part(path: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in VISUAL_TYPES and _url(part, kind) is not None:
        return MARKER
    if kind == "input_audio":
        return CLIP_MARKER
    if kind != "text" or not isinstance(part.get("text"), str):
        raise bad_field(
            path, "is neither a string nor a list of parts of type text, image_url, video_url or input_audio"
        )
    return str(part["text"])


def _url(part: Mapping[str, Any], kind: str) -> str | None:
    value = part.get(kind)
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else None


def parse_images(given: Mapping[str, Any]) -> list[Any]:
    """Return the data URLs of the images of all messages, in order, those of videos as {"video": URL}.

    A video also has the key `use_audio_in_video` of its part. Other URLs are rejected and never fetched.
    """
    urls: list[Any] = []
    for number, message in enumerate(given["messages"]):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if (kind := part.get("type")) not in VISUAL_TYPES:
                continue
            (medium, prefixes), url = VISUAL_TYPES[kind], _url(part, kind) or ""
            if not url.startswith(prefixes):
                path, accepted = f"messages[{number}].content", f"{prefixes[0]}...;base64,"
                article = "an" if medium == "image" else "a"
                raise bad_field(path, f"has {article} {medium} URL other than {accepted}; URLs are not fetched")
            use_audio = part.get("use_audio_in_video")
            if use_audio is not None and not isinstance(use_audio, bool):
                reason = f"has use_audio_in_video={repr(use_audio)[:50]}; accepted: true or false"
                raise bad_field(f"messages[{number}].content", reason)
            video = {"video": url} if use_audio is None else {"video": url, "use_audio_in_video": use_audio}
            urls.append(url if medium == "image" else video)
    if len(urls) > MAX_IMAGES:
        raise bad_field("messages", f"has {len(urls)} images and videos; accepted: at most {MAX_IMAGES}")
    return urls


def parse_audios(given: Mapping[str, Any]) -> list[str]:
    """Return the audio clips of all messages as data URLs, in order."""
    urls: list[str] = []
    for number, message in enumerate(given["messages"]):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") != "input_audio":
                continue
            path, clip = f"messages[{number}].content", part.get("input_audio")
            if not isinstance(clip, dict) or not isinstance(clip.get("data"), str):
                raise bad_field(path, "has an input_audio without data, the base64 of a file")
            if clip.get("format") not in AUDIO_FORMATS:
                raise bad_field(path, f"has an input_audio of another format; accepted: {', '.join(AUDIO_FORMATS)}")
            urls.append(f"data:audio/{clip['format']};base64,{clip['data']}")
    if len(urls) > MAX_CLIPS:
        raise bad_field("messages", f"has {len(urls)} audio clips; accepted: at most {MAX_CLIPS}")
    return urls


def _parse_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    """Return earlier calls, with their arguments as objects, as templates expect them."""
    parsed = []
    listed: list[Any] = calls if isinstance(calls, list) else [None]
    for call in listed:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field(path, "is not a list of calls with function.name and function.arguments")
        arguments = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            raise bad_field(path, "has arguments that are not valid JSON") from None
        if not isinstance(arguments, dict):
            raise bad_field(path, "has arguments that are not a JSON object")
        made = {"name": function["name"], "arguments": arguments}
        parsed.append({"id": str(call.get("id") or ""), "type": "function", "function": made})
    return parsed


def parse_tools(given: Mapping[str, Any]) -> Tools:
    """Return the tools that the model may call; none if tool_choice says so."""
    tools = get_typed(given, "tools", list, [])
    if len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"has {len(tools)} tools; accepted: at most {MAX_TOOLS}")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_field(f"tools[{number}]", "is not an object with type=function and function.name")
        if not isinstance(function.get("parameters", {}), dict):
            raise bad_field(f"tools[{number}].function.parameters", "is not a JSON schema")
    return [] if given.get("tool_choice") == "none" else tools


def parse_tool_choice(given: Mapping[str, Any], tools: Tools) -> str:
    """Return the grammar of the calls that the model has to make; empty if it may choose."""
    choice = given.get("tool_choice", "auto")
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise bad_field("tool_choice", f"is not supported; accepted: {', '.join(CHOICES)}, or a function")
        chosen = names if choice == "required" else []
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise bad_field("tool_choice", f"names no function of tools; accepted: {', '.join(names) or 'none'}")
        chosen = [name]
    if choice == "required" and not tools:
        raise bad_field("tool_choice", "is required, but the request has no tools")
    if not chosen:
        return ""
    calls = [_call_schema(tool["function"]) for tool in tools if tool["function"]["name"] in chosen]
    is_one = not isinstance(choice, str) or given.get("parallel_tool_calls") is False
    limit = {"maxItems": 1} if is_one else {}
    try:
        return json_grammar({"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}})
    except GrammarError as error:
        raise bad_field("tool_choice", f"is not available: {error}", code="unsupported_parameter") from None


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {"type": "object", **function.get("parameters", {})}
    properties = {"name": {"const": function["name"]}, "arguments": arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
