"""Responses and stream events have the fields of OpenAI's models, and its client's stream parser reads them."""

import json
from typing import Any

import pytest

from tests.decode.test_chat_turns import CALLS, TOOLS, TURNS, running
from tests.decode.test_openai_server import HELLO, prompts, server  # noqa: F401
from tests.support.openai_shapes import check_event, check_shape
from tests.support.running_server import RunningServer
from tests.support.skips import import_optional

openai = import_optional("openai", extra="test")
types = openai.types
FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


def events_of(running_server: RunningServer, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and value of each server-sent event, read without a client."""
    data = json.dumps({"model": "tiny", "stream": True, **body}).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    text = running_server.raw(sent).partition(b"\r\n\r\n")[2].decode()
    events = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((lines.get("event", ""), lines["data"]))
    return [(name, value if value == "[DONE]" else json.loads(value)) for name, value in events]


@pytest.mark.slow
@pytest.mark.default_cases("qwen3", "gpt-oss")
@pytest.mark.parametrize("family", TURNS)
def test_streamed_responses_equal_complete_ones(family: str) -> None:
    with running(family) as (engine, _):
        client = engine.server.client()
        engine.text = "".join(TURNS[family])
        complete = client.responses.create(model="tiny", input="hello", tools=FUNCTIONS)
        with client.responses.stream(model="tiny", input="hello", tools=FUNCTIONS) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        raw = events_of(engine.server, "/v1/responses", {"input": "hello", "tools": FUNCTIONS})
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    calls = [(item.name, json.loads(item.arguments)) for item in final.output if item.type == "function_call"]
    assert calls == CALLS[: len(calls)] and calls
    assert kinds.count("response.function_call_arguments.done") == len(calls)
    for found, expected in zip(final.output, complete.output, strict=True):
        assert found.type == expected.type
        assert getattr(found, "content", None) == getattr(expected, "content", None)
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
    for number, (name, event) in enumerate(raw):
        assert name == event["type"] and event["sequence_number"] == number
        check_event(event)


def test_a_streamed_response_with_text(server: RunningServer) -> None:  # noqa: F811
    client = server.client()
    complete = client.responses.create(model="tiny", input="hello", max_output_tokens=3)
    with client.responses.stream(model="tiny", input="hello", max_output_tokens=3) as stream:
        events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    head = ["created", "in_progress", "output_item.added", "content_part.added"]
    tail = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[:4] == head and kinds[-4:] == tail and {*kinds[4:-4]} == {"output_text.delta"}
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-2].item.status == complete.output[0].status == "incomplete"
    assert len(text.split()) == len(complete.output_text.split()) == 3
    for body in ({"input": "hello"}, {"input": "hello", "max_output_tokens": 2}):
        for _, event in events_of(server, "/v1/responses", body):
            check_event(event)
        status, value = server.post({"model": "tiny", **body}, "/v1/responses")
        assert status == 200
        check_shape(types.responses.Response, value)


@pytest.mark.parametrize(
    ("path", "body", "complete", "chunk"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "chat.ChatCompletion", "chat.ChatCompletionChunk"),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2},
            "chat.ChatCompletion",
            "chat.ChatCompletionChunk",
        ),
        ("/v1/completions", {"prompt": "hello"}, "Completion", "Completion"),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2}, "Completion", "Completion"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "Completion", "Completion"),
    ],
)
def test_completions_have_the_fields_of_openai(
    server: RunningServer,  # noqa: F811
    path: str,
    body: dict[str, Any],
    complete: str,
    chunk: str,
) -> None:
    def named(name: str) -> Any:
        return getattr(types.chat, name.removeprefix("chat.")) if "." in name else getattr(types, name)

    status, value = server.post({"model": "tiny", **body}, path)
    assert status == 200
    check_shape(named(complete), value)
    events = events_of(server, path, {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == ("", "[DONE]")
    for name, event in events[:-1]:
        assert name == ""
        if chunk == "Completion":
            # OpenAI streams null until the last chunk, which this model of the complete response does not accept.
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        check_shape(named(chunk), event)


@pytest.mark.slow
@pytest.mark.default_cases("qwen3", "gpt-oss")
@pytest.mark.parametrize("family", TURNS)
def test_tool_calls_have_the_fields_of_openai(family: str) -> None:
    with running(family) as (engine, _):
        engine.text = "".join(TURNS[family])
        body: dict[str, Any] = {"messages": HELLO, "tools": TOOLS}
        status, value = engine.server.post({"model": "tiny", **body})
        events = events_of(engine.server, "/v1/chat/completions", body)
    assert status == 200 and value["choices"][0]["message"]["tool_calls"]
    check_shape(types.chat.ChatCompletion, value)
    for _, event in events[:-1]:
        check_shape(types.chat.ChatCompletionChunk, event)


def test_lists_of_models_have_the_fields_of_openai(server: RunningServer) -> None:  # noqa: F811
    value = json.loads(server.get("/v1/models").partition(b"\r\n\r\n")[2])
    for card in value["data"]:
        check_shape(types.Model, card)
