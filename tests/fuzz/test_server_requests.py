"""Requests to the server: every one is answered, or rejected with a status and a message."""

import contextlib
import json
import socket
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example
from hypothesis import strategies as st

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.decode import Sampling
from maxhydra.decode.openai_server import Access, ServerDefaults
from maxhydra.decode.openai_server.http11 import HttpError, dump_slices, parse_head
from maxhydra.decode.openai_server.request_schema import SUPPORTED_CHAT, parse
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.record.loopback import is_allowed_host
from tests.support.fake_engine import FakeEngine
from tests.support.fuzzing import fuzz
from tests.support.running_server import RunningServer

DEFAULTS = ServerDefaults("tiny", Sampling(max_tokens=4), 8, 320, 512)  # type: ignore[call-arg]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"

# Request heads: a valid one with damaged bytes, and lines in any order.
LINES = st.sampled_from(
    [
        b"GET /health HTTP/1.1",
        b"POST /v1/completions HTTP/1.1",
        b"GET http://[::1 HTTP/1.1",
        b"Host: localhost",
        b"Host: [::1]:80",
        b"Content-Length: 3",
        b"Content-Length: 99999999999999999999",
        b"Transfer-Encoding: chunked",
        b"Content-Type: application/json",
        b"Connection: close",
        b"Expect: 100-continue",
        b" folded",
        b"a:\x00",
        b"",
    ]
)
HEADS = st.lists(LINES | st.binary(max_size=30), max_size=8).map(lambda lines: b"\r\n".join([*lines, b"", b""]))
VALID_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Replace, insert or remove a few bytes."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 6)))
        content = content[:start] + draw(st.binary(max_size=6)) + content[end:]
    return content


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-2, 400),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=20),
        st.sampled_from(["", "a", "user", "system", "tiny", "text", "\ud800", "<|end|>", "hello " * 200]),
    ),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", 1]) | VALUES},
        optional={"content": st.text(max_size=30) | VALUES, "tool_calls": VALUES, "name": VALUES},
    )
    | VALUES,
    max_size=5,
)
FIELDS = st.sampled_from([*SUPPORTED_CHAT, "prompt", "logit_bias", "tools", "user", "echo", "temprature"])
OBJECTS = st.builds(
    lambda fields, chat, text: {**fields, **({"messages": chat} if chat else {}), **({"prompt": text} if text else {})},
    st.dictionaries(FIELDS, VALUES, max_size=4),
    st.none() | MESSAGES,
    st.none() | st.text(max_size=30) | st.lists(st.integers(0, 330), max_size=9) | VALUES,
)
BODIES = st.one_of(
    OBJECTS.map(lambda value: json.dumps(value).encode()),
    damaged(json.dumps({"prompt": "a", "stop": ["b"], "n": 2, "seed": 1, "stream": True}).encode()),
    st.binary(max_size=60),
    st.text(st.sampled_from('{}[]",:\\u0123eE+-.ntf '), max_size=40).map(str.encode),
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    path: Path = tmp_path_factory.mktemp("chat") / "chat.jinja"
    path.write_text(TEMPLATE)
    return PromptEncoder(compose([f"data.tokenizer.chat_template={path}"]).config.data, vocab_size=320)


@pytest.mark.slow
@fuzz(cases=200, rejects=(HttpError,), data=HEADS | damaged(VALID_HEAD))
@example(b"\r\n\r\n")
@example(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2\r\n\r\n")
def test_request_head(data: bytes) -> None:
    head = parse_head(data)
    assert head.path.startswith("/") and 0 <= head.length < 10**15 and head.keeps_alive in (True, False)
    is_allowed_host(head.headers.get("host", ""))
    Access("key", is_local=True).check(head)


@pytest.mark.slow
@fuzz(cases=120, rejects=(HttpError,), body=BODIES, is_chat=st.booleans())
@example(b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}", False)
@example(b'{"seed": 1' + b"0" * 5000 + b', "prompt": "a"}', False)
@example(b'{"prompt": "a", "temperature": 1e400}', False)
def test_request_body(prompts: PromptEncoder, body: bytes, is_chat: bool) -> None:
    request = parse(body, DEFAULTS, is_chat=is_chat)
    assert 0 < request.sequences <= DEFAULTS.max_samples and request.is_chat == is_chat
    with contextlib.suppress(ValueError):
        if is_chat:
            prompts.encode_messages(request.messages, max_tokens=DEFAULTS.max_context)
        for prompt in request.prompts:
            if isinstance(prompt, str):
                prompts.encode_text(prompt, max_tokens=DEFAULTS.max_context)


@pytest.mark.slow
@fuzz(cases=100, value=VALUES)
def test_responses_in_slices_are_json(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    assert json.loads(dump_slices(value)) == json.loads(whole)


@pytest.fixture(scope="module")
def port(prompts: PromptEncoder) -> Iterator[int]:
    """Port of a server in a thread."""
    server = RunningServer(FakeEngine(), prompts, max_sequences=20, max_connections=50, timeout=5.0, drain=1.0)
    yield server.port
    server.end()


def request_over_socket(port: int, data: bytes) -> bytes:
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=240) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            received += part
    return received


@fuzz(cases=25, data=HEADS | damaged(VALID_HEAD + b"{}") | BODIES)
def test_socket(port: int, data: bytes) -> None:
    received = request_over_socket(port, data)
    assert received == b"" or received.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4", b"HTTP/1.1 100"))
    health = request_over_socket(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert health.startswith(b"HTTP/1.1 200")


@fuzz(cases=25, body=OBJECTS, path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
def test_body_over_a_socket(port: int, body: dict[str, Any], path: str) -> None:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=240) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        received = b""
        while part := connection.recv(65536):
            received += part
    status = int(received[9:12])
    assert status in (200, 400, 404, 429), received[:300]
    if status != 200:
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]


HOSTS = st.text(st.sampled_from(string.ascii_lowercase + "0123456789.:[]@/ "), max_size=12)


@fuzz(cases=100, name=HOSTS, port=st.none() | st.integers(0, 70000))
def test_only_allowed_hosts_pass(name: str, port: int | None) -> None:
    allowed = is_allowed_host(name, port=port)
    names = {"localhost", "127.0.0.1", "[::1]"}
    assert not allowed or (name in names or name.rpartition(":")[0] in names)
