"""The server as seen by its clients: OpenAI's client library, and raw sockets for invalid requests."""

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.config.schema.decode import Sampling
from maxhydra.decode.openai_server import ServerDefaults, parser_process
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.request_schema import parse
from maxhydra.decode.openai_server.response_schema import ResponseBuilder
from maxhydra.decode.request import Completion, Delta, Request, TokenLogprob
from maxhydra.decode.sampling_params import PromptEncoder
from tests.support.fake_engine import WORDS, FakeEngine
from tests.support.pictures import picture
from tests.support.running_server import RunningServer, eventually, parse_response
from tests.support.skips import import_optional
from tests.support.vocabularies import byte_level, save

openai = import_optional("openai", extra="test")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
VISION = model_option("llama4-tiny-vision").vision
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    path: Path = tmp_path_factory.mktemp("chat") / "chat.jinja"
    path.write_text(TEMPLATE)
    return PromptEncoder(compose([f"data.tokenizer.chat_template={path}"]).config.data, vocab_size=320)


@contextlib.contextmanager
def running(prompts: PromptEncoder, *, seconds: float = 0.0, slots: int = 8, **options: Any) -> Iterator[RunningServer]:
    server = RunningServer(FakeEngine(slots=slots, seconds=seconds), prompts, **options)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(
    scope="module", params=[0, pytest.param(2, marks=pytest.mark.exhaustive)], ids=["in_process", "processes"]
)
def server(prompts: PromptEncoder, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with running(prompts, processes=request.param) as server:
        yield server


@pytest.fixture(scope="module")
def local_server(prompts: PromptEncoder) -> Iterator[RunningServer]:
    """In this process, whose constants a test may change."""
    with running(prompts) as server:
        yield server


def expected_words(start: str, count: int) -> str:
    first = WORDS.index(start)
    return " ".join(WORDS[(first + n) % len(WORDS)] for n in range(count))


def test_a_profile_is_requested_by_post_from_this_machine(server: RunningServer, prompts: PromptEncoder) -> None:
    def ask(extra: str = "", host: str = "127.0.0.1") -> bytes:
        head = f"POST /profile HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\nConnection: close\r\n{extra}\r\n"
        return server.raw(head.encode() + b"{}")

    json_type = "Content-Type: application/json\r\n"
    assert b"415" in ask() and b"403" in ask(json_type, host="evil.example")
    assert not server.profiler.is_due(1)
    answer = ask(json_type)
    assert b"202 Accepted" in answer and b"outputs/it/profile" in answer
    assert server.profiler.is_due(2) and not server.profiler.is_due(3)


# With OpenAI's client.


def test_chat_with_samples_and_usage(server: RunningServer) -> None:
    client = server.client()
    one = client.chat.completions.create(model="tiny", messages=HELLO, seed=3)  # type: ignore[arg-type]
    two = client.chat.completions.create(model="tiny", messages=HELLO, seed=3, n=2, max_completion_tokens=6)  # type: ignore[call-overload]
    text = one.choices[0].message.content
    assert text == expected_words(text.split()[0], 4) and one.choices[0].finish_reason == "length"
    assert one.usage is not None and one.usage.prompt_tokens == len("<user>hello\n<assistant>")
    assert one.usage.completion_tokens == 4 and one.usage.total_tokens == one.usage.prompt_tokens + 4
    first, second = (choice.message.content for choice in two.choices)
    assert first.startswith(text) and len(first.split()) == 6 and second != first and two.usage.completion_tokens == 12
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"


def test_content_may_come_in_parts(server: RunningServer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    make = server.client().chat.completions.create
    whole, parted = (make(model="tiny", messages=m, seed=1) for m in (HELLO, parts))  # type: ignore[call-overload]
    assert whole.choices[0].message.content == parted.choices[0].message.content


def test_streams_equal_complete_responses(server: RunningServer) -> None:
    make = server.client().chat.completions.create
    settings: Any = {"model": "tiny", "messages": HELLO, "seed": 9, "n": 2, "max_tokens": 7, "logprobs": True}
    whole = make(**settings, top_logprobs=2)
    texts, tokens, ends, usage = ["", ""], [[], []], [None, None], None
    for chunk in make(**settings, top_logprobs=2, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content and ends[choice.index] == choice.finish_reason == "length"
        assert tokens[choice.index] == choice.logprobs.content and len(tokens[choice.index]) == 7
        assert [top.logprob for top in tokens[choice.index][0].top_logprobs] == [-1.0, -2.0]
    assert usage == whole.usage


def test_stop_strings_end_the_completion(server: RunningServer) -> None:
    make = server.client().chat.completions.create
    for stop in ("delta", ["zeta", "delta"]):
        done = make(model="tiny", messages=HELLO, max_tokens=16, stop=stop)  # type: ignore[call-overload]
        assert done.choices[0].finish_reason == "stop" and "delta" not in done.choices[0].message.content


def test_completions_of_texts_and_tokens(server: RunningServer) -> None:
    make = server.client().completions.create
    done = make(model="tiny", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1, seed=0)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3] and done.usage.prompt_tokens == 4
    first = done.choices[0].logprobs
    assert len(first.tokens) == len(first.token_logprobs) == len(first.text_offset) == len(first.top_logprobs) == 3
    same = make(model="tiny", prompt=[256, 97], max_tokens=3, seed=0)
    assert same.choices[0].text == done.choices[0].text
    pieces = make(model="tiny", prompt="a", max_tokens=3, seed=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == done.choices[0].text


@pytest.mark.parametrize("large", [False, True])
def test_echo_returns_the_prompt_with_its_log_probabilities(server: RunningServer, large: bool) -> None:
    make = server.client().completions.create
    settings: Any = {"model": "tiny", "prompt": [[97, 98, 99], [100, 101]], "echo": True, "logprobs": 1, "seed": 0}
    settings["user"] = "a" * 60_000 if large else "a"
    plain = make(**{**settings, "echo": False, "n": 2}, max_tokens=2)
    echoed = make(**settings, n=2, max_tokens=2)
    for index, (choice, without) in enumerate(zip(echoed.choices, plain.choices, strict=True)):
        prompt = "de" if index > 1 else "abc"
        assert choice.text == prompt + without.text
        assert choice.logprobs.tokens == [*prompt, *without.logprobs.tokens]
        assert choice.logprobs.token_logprobs == [None, *[-0.25] * (len(prompt) - 1), -0.5, -0.5]
        assert choice.logprobs.top_logprobs[:2] == [None, {prompt[1]: -0.25}]
        assert choice.logprobs.text_offset[: len(prompt)] == list(range(len(prompt)))
    only = make(**settings, max_tokens=0)
    assert [choice.text for choice in only.choices] == ["abc", "de"] and only.usage.completion_tokens == 0
    assert [choice.logprobs.token_logprobs for choice in only.choices] == [[None, -0.25, -0.25], [None, -0.25]]
    streams = make(**settings, max_tokens=2, n=2, stream=True)
    texts = ["", "", "", ""]
    for chunk in streams:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in echoed.choices]


def test_parameters_reach_the_engine(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Request] = []
    submit = server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda request: received.append(request) or submit(request))
    changes = {"frequency_penalty": 0.5, "presence_penalty": -1, "min_p": 0.1, "repetition_penalty": 1.1}
    assert server.post({**CHAT, **changes, "logit_bias": {"5": 1, "9": -100}})[0] == 200
    (request,) = received
    assert {name: getattr(request, name) for name in changes} == changes
    assert request.logit_bias == ((5, 1.0), (9, -100.0))


def test_tokenize_and_detokenize(server: RunningServer) -> None:
    status, body = server.post({"prompt": "aü"}, "/tokenize")
    assert status == 200 and body == {"tokens": [256, *"aü".encode()], "count": 4, "max_model_len": 512}
    assert server.post({"tokens": body["tokens"]}, "/detokenize") == (200, {"prompt": "<|begin|>aü"})
    chat = server.post({"messages": HELLO}, "/tokenize")[1]
    assert server.post({"tokens": chat["tokens"]}, "/detokenize")[1]["prompt"] == "<user>hello\n<assistant>"
    for path, wrong, param in (
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        status, body = server.post(wrong, path)
        assert status == 400 and body["error"]["param"] == param


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_images_reach_the_engine_with_their_tokens(
    prompts: PromptEncoder, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """With OpenAI's client: an image of two tiles and the whole image, in a body of any size; /tokenize agrees."""
    buffer = io.BytesIO()
    picture(30, 10).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": content}]
    received: list[Request] = []
    with running(PromptEncoder(prompts.data, vocab_size=320, vision=VISION), processes=processes) as server:
        submit = server.engine.submit
        monkeypatch.setattr(server.engine, "submit", lambda request: received.append(request) or submit(request))
        completion = server.client().chat.completions.create(model="tiny", messages=messages)  # type: ignore[call-overload]
        status, body = server.post({"messages": messages}, "/tokenize")
    (request,) = received
    tile = [300] * 4
    image = [301, *tile, 304, *tile, 304, 305, *tile, 302]
    assert list(request.prompt) == [*b"<user>", *image, *b"a\n<assistant>"]
    assert request.images is not None and request.images.shape == (3, 16, 16, 3)
    assert completion.usage.prompt_tokens == len(request.prompt)
    assert status == 200 and body["tokens"] == list(request.prompt)


def test_the_cost_of_log_probabilities_is_linear(prompts: PromptEncoder) -> None:
    builder = ResponseBuilder(False, "tiny", prompts, prompt_tokens=1, has_logprobs=True, include_usage=False)
    tokens = tuple(b"abc" * 10_000)
    completion = Completion("", tokens, tuple(TokenLogprob(token, -1.0, ()) for token in tokens), "length")
    began = time.process_time()
    (choice,) = builder.response([completion])["choices"]
    # Summing all previous lengths for each token would take 17 s.
    assert choice["logprobs"]["text_offset"] == list(range(30_000)) and time.process_time() - began < 6
    assert builder.chunk(0, Delta("", ()), 5)["choices"][0]["logprobs"]["text_offset"] == []


def test_without_a_seed_requests_differ_and_with_one_they_do_not(server: RunningServer) -> None:
    make = server.client().completions.create
    texts = {make(model="tiny", prompt="a", max_tokens=1).choices[0].text for _ in range(12)}
    assert len(texts) > 2
    fixed = {make(model="tiny", prompt="a", max_tokens=1, seed=1).choices[0].text for _ in range(4)}
    assert len(fixed) == 1


# Invalid requests.

CHAT = {"model": "tiny", "messages": HELLO}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1e999}, None),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": "2"}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"tempreature": 1}, "tempreature"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(600)}}, "logit_bias"),
        ({"echo": True}, "echo"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"\ud800": 1}, "?"),
    ],
)
def test_an_invalid_field_is_named(server: RunningServer, change: dict[str, Any], param: str | None) -> None:
    status, body = server.post({**CHAT, **change})
    assert status == 400 and body["error"]["param"] == param and body["error"]["message"], body
    assert body["error"]["type"] == "invalid_request_error"
    assert server.idle()


def test_errors_name_the_config_key_to_change(server: RunningServer) -> None:
    long = server.post({**CHAT, "messages": [{"role": "user", "content": "x" * 600}]})[1]
    assert "task.engine.max_context" in long["error"]["message"]
    assert "task.max_samples" in server.post({**CHAT, "n": 9})[1]["error"]["message"]
    assert "temperature" in server.post({**CHAT, "temprature": 9})[1]["error"]["message"]
    status, huge = server.post({**CHAT, "messages": [{"role": "user", "content": "x" * 10_000_000}]})
    assert status == 413 and "task.max_body_mib" in huge["error"]["message"]
    with pytest.raises(openai.APIStatusError) as raised:
        big = [{"role": "user", "content": "x" * 10_000_000}]
        server.client().chat.completions.create(model="tiny", messages=big)  # type: ignore[arg-type]
    assert raised.value.status_code == 413
    with pytest.raises(openai.NotFoundError) as missing:
        server.client().chat.completions.create(model="large", messages=HELLO)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found" and "'tiny'" in missing.value.message


@pytest.mark.parametrize("prompt", ["", [], [""], None, 5, [[]], ["a", [1]], [320], [-1], [True], {"a": 1}, ["x"] * 9])
def test_an_invalid_prompt_is_named(server: RunningServer, prompt: Any) -> None:
    status, body = server.post({"model": "tiny", "prompt": prompt}, "/v1/completions")
    accepted = prompt == ["a", [1]]
    assert status == (200 if accepted else 400) and (accepted or body["error"]["param"] == "prompt"), body


def test_neutral_and_null_fields_are_accepted(server: RunningServer) -> None:
    neutral = {
        "frequency_penalty": 0,
        "logit_bias": {},
        "tools": None,
        "user": "me",
        "response_format": {"type": "text"},
    }
    status, _ = server.post({**CHAT, **neutral, "temperature": None, "stop": None, "n": None, "stream": None})
    assert status == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 200_000, b'{"n": NaN}', b"1" * 9999]
)
def test_a_body_that_is_not_a_json_object_is_rejected(server: RunningServer, body: bytes) -> None:
    status, response = server.post(body)
    assert status == 400 and response["error"]["code"] == "invalid_json"


GOOD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"HELLO\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", 400),
        (b"GET http://x/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (GOOD + b"Host: localhost\r\n\r\n", 400),
        (GOOD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (GOOD + b"Content-Length: -1\r\n\r\n", 400),
        (GOOD + b"Content-Length: 1e3\r\n\r\n", 400),
        (GOOD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", 411),
        (GOOD + b"A: b\r\n folded\r\n\r\n", 400),
        (GOOD + b"A : b\r\n\r\n", 400),
        (GOOD + b"A: b\x00\r\n\r\n", 400),
        (GOOD + b"A: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (GOOD + b"A: b\r\n" * 150 + b"\r\n", 431),
        (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
        (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 403),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}", 415),
    ],
)
def test_invalid_http_is_rejected(server: RunningServer, data: bytes, status: int) -> None:
    code, body = parse_response(server.raw(data))
    assert code == status and body["error"]["message"]


def test_slow_and_silent_clients_are_disconnected(prompts: PromptEncoder) -> None:
    with running(prompts, timeout=0.8, keep_alive=0.8) as server:
        assert server.raw(b"") == b""
        assert parse_response(server.raw(b"GET /health HT"))[0] == 408
        slow = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        assert parse_response(server.raw(slow + b"Content-Length: 9\r\n\r\n{"))[0] == 408
        assert server.raw(GOOD + b"\r\n").startswith(b"HTTP/1.1 200")


def test_a_connection_serves_many_requests(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as connection:
        connection.sendall((GOOD + b"\r\n") * 3)
        received = b""
        while received.count(b"HTTP/1.1 200") < 3:
            received += connection.recv(4096)
    assert received.count(b'{"status": "ok"}') == 3


# Bounded work.

TEXT = "/v1/completions"
HOSTILE = {
    "stop": (TEXT, b'{"prompt": "1", "stop": [' + b'"a",' * 1_000_000 + b'"a"]}'),
    "empty prompts": (TEXT, b'{"prompt": [' + b"[]," * 1_300_000 + b"[]]}"),
    "prompts": (TEXT, json.dumps({"prompt": ["a"] * 200_000}).encode()),
    "ids": (TEXT, json.dumps({"prompt": [1] * 1_200_000}).encode()),
    "some ids": (TEXT, json.dumps({"prompt": [1] * 200_000}).encode()),
    "text": (TEXT, json.dumps({"prompt": "word, " * 600_000}).encode()),
    "keys": (TEXT, json.dumps({str(number): 1 for number in range(300_000)}).encode()),
    "bias": (TEXT, json.dumps({"prompt": "a", "logit_bias": {str(n): 1 for n in range(30_000)}}).encode()),
    "depth": (TEXT, b'{"model": ' + b"[" * 4_000_000),
    "nested model": (TEXT, b'{"prompt": "a", "model": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "nested limits": (
        TEXT,
        b'{"prompt": "a", "max_tokens": %b, "max_completion_tokens": %b}' % ((b"[" * 900 + b"]" * 900,) * 2),
    ),
    "messages": ("/v1/chat/completions", json.dumps({"messages": HELLO * 80_000}).encode()),
    "parts": ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": [1] * 200_000}]}).encode()),
    "special tokens": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "<|" * 10**6}]}).encode(),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_takes_little_time(name: str) -> None:
    path, body = HOSTILE[name]
    defaults = ServerDefaults("tiny", Sampling(max_tokens=4), 8, 320, 512)  # type: ignore[call-arg]
    began = time.process_time()
    with contextlib.suppress(HttpError):
        parse(body, defaults, is_chat="chat" in path)
    # One million stop strings took 17 s.
    assert time.process_time() - began < 4


@pytest.mark.slow
def test_small_requests_pass_hostile_ones(prompts: PromptEncoder) -> None:
    with running(prompts, max_body=2**22) as server, ThreadPoolExecutor(4) as pool:
        until = time.monotonic() + 2

        def attack(number: int) -> set[int]:
            statuses, names = set(), list(HOSTILE)
            while time.monotonic() < until:
                number += 1
                path, body = HOSTILE[names[number % len(names)]]
                statuses.add(server.post(body, path)[0])
            return statuses

        attacks = [pool.submit(attack, 4 * number) for number in range(4)]
        seconds = []
        while time.monotonic() < until:
            began = time.monotonic()
            assert server.post({"prompt": "1", "max_tokens": 2}, TEXT)[0] == 200
            seconds.append(time.monotonic() - began)
        # The clients of this test share the interpreter with the server, so the bound is generous.
        assert sorted(seconds)[len(seconds) // 2] < 10 and max(seconds) < 60
        assert set().union(*(each.result() for each in attacks)) <= {400, 404}
        assert server.idle()


LARGE = {"user": "a" * 40_000}


@pytest.mark.slow
def test_large_bodies_give_the_same_completions(server: RunningServer) -> None:
    """Parsed and tokenized in a process, which is replaced if it is killed."""
    for path, body in [
        ("/v1/chat/completions", {"messages": HELLO, "stop": ["never"], "n": 2, "seed": 5}),
        (TEXT, {"prompt": ["one", "two"], "logprobs": 2, "temperature": 0.5, "seed": 3}),
        (TEXT, {"prompt": [[1, 2, 3]], "max_tokens": 3, "seed": 1}),
        (TEXT, {"prompt": "", "seed": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "bard", "content": ""}]}),
    ]:
        small, large = (server.post(each, path) for each in (body, {**body, **LARGE}))
        assert small[0] == large[0] and small[1].get("error") == large[1].get("error")
        assert small[1].get("choices") == large[1].get("choices") and small[1].get("usage") == large[1].get("usage")
    if server.manager is None:
        process = server.service._parser._process
        assert process is not None and process.is_alive()
        process.kill()
        process.join()
        assert server.post({"prompt": "1", **LARGE}, TEXT)[0] == 200


@pytest.mark.slow
def test_a_body_that_takes_too_long_to_parse(local_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_server.post({"prompt": "1", **LARGE}, TEXT)[0] == 200
    os.kill(local_server.service._parser._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(parser_process, "PARSE_SECONDS", 0.1)
        status, body = local_server.post({"prompt": "1", **LARGE}, TEXT)
        assert status == 400 and "was not parsed within 0.1 s" in body["error"]["message"]
    assert local_server.post({"prompt": "1", **LARGE}, TEXT)[0] == 200


def test_too_many_large_bodies_are_rejected(local_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_process, "MAX_PENDING", 100_000)
    data = json.dumps({"prompt": "1", "user": "a" * 60_000}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", local_server.port), timeout=240) as slow:
        slow.sendall(head.encode() + data[:-1])
        assert eventually(lambda: local_server.service.counters.total("large_bytes") == len(data))
        answer = local_server.raw(head.encode() + data)
        assert b" 429 " in answer and b"Retry-After: 1" in answer and b"large requests are being read" in answer
        assert local_server.post({"prompt": "1"}, TEXT)[0] == 200
        slow.sendall(data[-1:])
        assert b" 200 " in slow.recv(4096)
    assert local_server.post(data, TEXT)[0] == 200 and local_server.service.counters.total("large_bytes") == 0


@pytest.mark.exhaustive
def test_large_bodies_are_tokenized_with_the_files_that_the_server_read(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    data = compose([f"data.tokenizer.chat_template={tmp_path / 't.jinja'}"]).config.data
    with running(PromptEncoder(data, vocab_size=320)) as server:
        (tmp_path / "t.jinja").write_text(TEMPLATE + "!")
        status, body = server.post({"messages": HELLO, **LARGE})
        assert status == 500 and "files have changed since the server started" in body["error"]["message"]
        assert server.post({"messages": HELLO})[0] == 200


def test_a_text_with_many_commas_is_accepted(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a", "user": ',"[{:\\' * 100_000}).encode()
    assert server.post(body, TEXT)[0] == 200


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content * 10**10 if m.content == 'bomb' else m.content }}{% endfor %}"]
)
def test_a_template_that_fails_is_an_error_of_that_request_only(tmp_path: Path, template: str) -> None:
    (tmp_path / "t.jinja").write_text(template)
    encoder = PromptEncoder(
        compose([f"data.tokenizer.chat_template={tmp_path / 't.jinja'}"]).config.data, vocab_size=320
    )
    with running(encoder) as server:
        status, body = server.post({"messages": [{"role": "user", "content": "bomb"}]})
        assert status == 400 and "exceeds a limit" in body["error"]["message"]
        assert server.post(CHAT)[0] == 200


@pytest.mark.slow
def test_a_panic_of_the_tokenizer_is_an_error_of_that_request_only(tmp_path: Path) -> None:
    made = byte_level(["<a>"])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    data = compose(["data.tokenizer.kind=hf", f"data.tokenizer.path={save(made, tmp_path)}"]).config.data
    with running(PromptEncoder(data, vocab_size=700)) as server:
        status, body = server.post({"prompt": "a" * 60 + "!"}, TEXT)
        assert status == 400 and "the tokenizer failed on a text" in body["error"]["message"], body
        assert server.post({"prompt": "b"}, TEXT)[0] == 200


@pytest.mark.slow
def test_the_limit_of_open_files_is_raised_or_reported() -> None:
    script = """
import resource
from maxhydra.config import ConfigError
from maxhydra.decode.openai_server import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000))
allow_connections(1024)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    allow_connections(2000)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert done.startswith("(1536, 2000)\n")
    assert "task.max_connections=2000: needs 2512 open files" in done and "accepted: 1 to 1488" in done


# Access, limits, disconnects, shutdown.


def test_the_api_key_is_required_and_never_leaked(prompts: PromptEncoder) -> None:
    with running(prompts, key="sesame-1234") as server:
        assert server.client("sesame-1234").models.list().data[0].id == "tiny"
        for wrong in ("sesame-123", "", "sesame-12345"):
            with pytest.raises(openai.AuthenticationError) as raised:
                server.client(wrong or "x").models.list()
            assert "sesame" not in str(raised.value)
        assert parse_response(server.get("/health"))[0] == 200 and parse_response(server.get("/metrics"))[0] == 401


def test_a_full_queue_gives_429_with_retry_after(prompts: PromptEncoder) -> None:
    with running(prompts, max_sequences=4, slots=2, seconds=1.0) as server:
        make = server.client().completions.create
        with ThreadPoolExecutor(4) as pool:
            requests = [pool.submit(make, model="tiny", prompt="a", max_tokens=40) for _ in range(4)]
            assert eventually(lambda: b"server_sequences 4\n" in server.get("/metrics"))
            with pytest.raises(openai.RateLimitError) as raised:
                make(model="tiny", prompt="a")
            assert raised.value.response.headers["retry-after"] == "1" and "task.queue" in raised.value.message
            server.engine.seconds = 0.001
            assert all(len(done.result().choices[0].text.split()) == 40 for done in requests)
        assert make(model="tiny", prompt="a").choices[0].text
        metrics = server.get("/metrics").decode()
        assert "maxhydra_server_sequences 0\n" in metrics and 'responses{status="429"} 1' in metrics
        assert "maxhydra_engine_tokens_written 164\n" in metrics
        assert 'vllm:generation_tokens_total{model_name="tiny"} 164\n' in metrics
        assert 'vllm:request_success_total{model_name="tiny",finished_reason="length"} 5\n' in metrics


def test_too_many_connections_are_rejected(prompts: PromptEncoder) -> None:
    with running(prompts, max_connections=2) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert eventually(lambda: b" 503 " in server.get("/health"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_frees_its_slots(prompts: PromptEncoder, stream: bool) -> None:
    with running(prompts, seconds=0.05) as server:
        body = json.dumps({**CHAT, "n": 4, "max_tokens": 450, "stream": stream}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert eventually(lambda: server.engine.stats()["running"] == 4)
        assert server.idle() and server.engine.stats()["tokens_written"] < 1700
        assert b"maxhydra_server_sequences 0\n" in server.get("/metrics")


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_shutdown_drains_requests_and_cancels_slow_ones(prompts: PromptEncoder, processes: int) -> None:
    engine = FakeEngine(seconds=0.5)
    server = RunningServer(engine, prompts, max_sequences=9, drain=2.0, processes=processes)
    make = server.client().completions.create
    with ThreadPoolExecutor(2) as pool:
        short, long = (pool.submit(make, model="tiny", prompt="a", max_tokens=n) for n in (8, 450))
        assert eventually(lambda: engine.stats()["running"] == 2)
        engine.seconds = 0.02
        idle = socket.create_connection(("127.0.0.1", server.port))
        began = time.monotonic()
        server.end()
        assert time.monotonic() - began > 1.5 and idle.recv(1) == b""
        assert len(short.result().choices[0].text.split()) == 8
        with pytest.raises(openai.APIConnectionError):
            long.result()


def test_an_engine_failure_is_reported(prompts: PromptEncoder) -> None:
    with running(prompts, seconds=0.01) as server:
        make = server.client().completions.create
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(make, model="tiny", prompt="a", max_tokens=400)
            assert eventually(lambda: server.engine.stats()["running"] == 1)
            assert parse_response(server.get("/health"))[0] == 200
            server.engine.fail("out of memory")
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                pending.result()
        assert parse_response(server.get("/health"))[0] == 503 and server.post(CHAT)[0] == 503


@pytest.mark.exhaustive
def test_64_clients_lose_no_request(prompts: PromptEncoder) -> None:
    with running(prompts, slots=16, seconds=0.001) as server:
        until, client = time.monotonic() + 1, server.client()

        def send_requests(number: int) -> int:
            served = 0
            while not served or time.monotonic() < until:
                stream = bool((number + served) % 2)
                done = client.completions.create(
                    model="tiny", prompt=f"{number}", max_tokens=5, seed=number, stream=stream
                )
                text = "".join(c.choices[0].text for c in done) if stream else done.choices[0].text  # type: ignore[union-attr]
                assert text == expected_words(text.split()[0], 5)
                served += 1
            return served

        with ThreadPoolExecutor(64) as pool:
            served = list(pool.map(send_requests, range(64)))
        assert min(served) > 0 and server.idle()
        assert server.engine.stats()["tokens_written"] == 5 * sum(served)
