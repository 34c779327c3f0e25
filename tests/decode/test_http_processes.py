"""The HTTP server in separate processes: the same responses, common limits, and the death of either side."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.data.audio.tokens import Clips
from maxhydra.decode.openai_server import EncoderSettings, engine_messages
from maxhydra.decode.openai_server.counters import Counters
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.process_manager import Link
from maxhydra.decode.request import Delta, Request, TokenLogprob
from maxhydra.decode.sampling_params import PromptEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.polling import wait_for
from tests.support.processes import children, is_alive
from tests.support.running_server import RunningServer, parse_response

TEXT = "/v1/completions"
SLOW: dict[str, Any] = {"prompt": "a", "max_tokens": 400}


@pytest.fixture(scope="module")
def prompts() -> PromptEncoder:
    return PromptEncoder(compose([]).config.data, vocab_size=320)


@pytest.fixture(scope="module")
def server(prompts: PromptEncoder) -> Iterator[RunningServer]:
    """With two processes, a queue for 12 sequences and 6 connections."""
    server = RunningServer(FakeEngine(slots=8), prompts, processes=2, max_sequences=12, max_connections=6)
    yield server
    server.end()


def workers(server: RunningServer) -> list[int]:
    assert server.manager is not None
    return [process.pid or 0 for process in server.manager._processes.values()]


def numbers(server: RunningServer, name: str | int) -> list[int]:
    """A counter of each process."""
    assert server.manager is not None
    counters = server.manager._counters
    return [counters.of(row).own(name) for row in range(counters.num_rows)]


@contextlib.contextmanager
def accepting(server: RunningServer, row: int) -> Iterator[None]:
    """Let only one of the processes accept connections: which one does is up to the kernel."""
    others = [pid for index, pid in enumerate(workers(server)) if index != row]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def post_stream(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    received = server.raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    events = received.partition(b"\r\n\r\n")[2].decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2, "max_tokens": 6},
        {"logprobs": 2, "max_tokens": 3},
        {"echo": True, "logprobs": 1, "max_tokens": 2},
        {"stop": ["delta", "zeta"], "max_tokens": 16},
        {"temperature": -1},
        {"prompt": "x" * 600},
    ],
)
def test_responses_equal_those_of_one_process(
    server: RunningServer, prompts: PromptEncoder, change: dict[str, Any]
) -> None:
    body = {"prompt": ["a", "bc"], "seed": 3, **change}
    local = RunningServer(FakeEngine(), prompts)
    try:
        expected = local.post(body, TEXT)
    finally:
        local.end()
    status, answer = server.post(body, TEXT)
    assert status == expected[0] and answer.get("choices") == expected[1].get("choices")
    assert answer.get("usage") == expected[1].get("usage") and answer.get("error") == expected[1].get("error")
    if status == 200:
        texts = [""] * len(answer["choices"])
        for event in post_stream(server, body):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in answer["choices"]]


@pytest.mark.slow
def test_metrics_and_limits_are_common(server: RunningServer) -> None:
    """Both processes serve; the limits of the queue and of connections hold for both together."""
    before = numbers(server, 200)
    for row in (0, 1):
        with accepting(server, row):
            assert server.post({"prompt": "a"}, TEXT)[0] == 200
    assert np.subtract(numbers(server, 200), before).tolist() == [1, 1]
    assert f'responses{{status="200"}} {sum(numbers(server, 200))}\n'.encode() in server.get("/metrics")
    server.engine.seconds = 0.05
    with ThreadPoolExecutor(3) as pool:
        requests = [pool.submit(server.post, {**SLOW, "n": 4}, TEXT) for _ in range(3)]
        wait_for(lambda: b"maxhydra_server_sequences 12\n" in server.get("/metrics"))
        status, answer = server.post({"prompt": "a"}, TEXT)
        assert status == 429 and answer["error"]["message"].startswith("12 sequences are running or queued")
        server.engine.seconds = 0.0
        assert [each.result()[0] for each in requests] == [200] * 3
    links = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(6)]
    wait_for(lambda: sum(numbers(server, "connections")) == 6)
    status, answer = parse_response(server.get("/health"))
    assert status == 503 and "task.max_connections=6" in answer["error"]["message"]
    for link in links:
        link.close()
    wait_for(lambda: sum(numbers(server, "connections")) == 0)
    assert sum(numbers(server, "sequences")) == 0


def test_processes_get_equal_shares_of_connections(server: RunningServer) -> None:
    """Also of connections that are opened one after the other, while no process is busy."""
    wait_for(lambda: sum(numbers(server, "connections")) == 0)
    shares = []
    for _ in range(5):
        links = []
        for count in range(1, 7):
            links.append(socket.create_connection(("127.0.0.1", server.port)))
            wait_for(lambda count=count: sum(numbers(server, "connections")) == count)
        shares.append(numbers(server, "connections"))
        for link in links:
            link.close()
        wait_for(lambda: sum(numbers(server, "connections")) == 0)
    # On a busy machine, the process with fewer connections may take longer than FAIR_SECONDS to wake up.
    assert shares.count([3, 3]) >= 3, shares


def test_a_disconnected_client_frees_its_slots(server: RunningServer) -> None:
    before = server.engine.stats()["tokens_written"]
    server.engine.seconds = 0.05
    data = json.dumps({**SLOW, "n": 4}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_for(lambda: server.engine.stats()["running"] == 4)
    assert server.idle() and server.engine.stats()["tokens_written"] - before < 4 * SLOW["max_tokens"]
    server.engine.seconds = 0.0
    wait_for(lambda: sum(numbers(server, "sequences")) == 0)


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(server: RunningServer) -> None:
    """Its requests fail and leave nothing running; those of the other process finish."""
    before = server.engine.stats()["tokens_written"]
    server.engine.seconds = 0.004
    with ThreadPoolExecutor(8) as pool:
        sent = []
        for row, count in ((0, 2), (1, 5)):
            with accepting(server, row):
                sent += [pool.submit(server.raw, request(SLOW)) for _ in range(count - len(sent))]
                wait_for(lambda count=count: server.engine.stats()["running"] == count)
        assert numbers(server, "sequences") == [2, 3]
        killed = workers(server)[0]
        os.kill(killed, signal.SIGKILL)
        answers = [each.result() for each in sent]
    assert [b" 200 OK" in answer[:20] for answer in answers] == [False] * 2 + [True] * 3
    assert server.idle() and sum(numbers(server, "sequences")) == 0
    assert server.engine.stats()["tokens_written"] - before < 5 * SLOW["max_tokens"]
    server.engine.seconds = 0.0
    wait_for(lambda: killed not in workers(server))
    before = numbers(server, 200)[0]
    with accepting(server, 0):
        assert server.post({"prompt": "a"}, TEXT)[0] == 200
    assert numbers(server, 200)[0] == before + 1


@pytest.mark.exhaustive
def test_a_process_without_an_engine_ends(server: RunningServer) -> None:
    assert server.manager is not None
    lost = workers(server)[1]
    server.manager._links[1]._pipe.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: not is_alive(lost))


@pytest.mark.exhaustive
def test_an_engine_failure_is_reported_by_all_processes(prompts: PromptEncoder) -> None:
    server = RunningServer(FakeEngine(seconds=0.01), prompts, processes=1)
    try:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(server.post, SLOW, TEXT)
            wait_for(lambda: server.engine.stats()["running"] == 1)
            server.engine.fail("out of memory")
            assert pending.result()[0] == 500
        assert parse_response(server.get("/health"))[0] == 503 and server.post({"prompt": "a"}, TEXT)[0] == 503
    finally:
        server.end()


@pytest.mark.exhaustive
def test_processes_end_with_the_engine() -> None:
    """Also if the kernel kills the engine's process."""
    script = """
import signal
from maxhydra.config.compose.composer import compose
from maxhydra.decode.sampling_params import PromptEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer
if __name__ == "__main__":
    server = RunningServer(FakeEngine(seconds=0.1), PromptEncoder(compose([]).config.data, vocab_size=320), processes=2)
    print(server.port, flush=True)
    signal.pause()
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert process.stdout is not None
    port = int(process.stdout.readline())
    pids = children(process.pid)
    assert len(pids) == 2
    with socket.create_connection(("127.0.0.1", port), timeout=240) as connection:
        connection.sendall(request(SLOW))
        process.kill()
        process.wait()
        # The connection was reset, or closed without a response.
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
    wait_for(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_a_process_that_cannot_start_ends_the_server(prompts: PromptEncoder) -> None:
    settings = dataclasses.replace(EncoderSettings.of(prompts), files="changed")
    server = RunningServer(FakeEngine(), prompts, processes=1, encoder=settings, waits=False)
    server.thread.join(240)
    assert "cannot be started: the tokenizer's files have changed since the server started" in str(server.failure)
    server.end()


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


# Messages.


def test_messages_keep_requests_deltas_and_errors() -> None:
    """Sent byte by byte, so that every message arrives in parts."""
    images = np.arange(12, dtype=np.float32).reshape(1, 2, 2, 3)
    audio = Clips(np.ones((1, 2, 3), np.float32), np.array([2], np.int32))
    sent = Request(
        (1, 2, 300_000),
        5,
        0.5,
        0,
        1.0,
        0.0,
        1.0,
        2**63,
        ("a", "\ud800"),
        True,
        logit_bias=((5, -1.5),),
        images=images,
        audio=audio,
    )
    deltas = [
        Delta("", (1, 2), (), None, is_detokenized=False),
        Delta("", (3,), (), "stop", is_detokenized=False),
        Delta("tü", (4,), (TokenLogprob(4, -0.5, ((4, -0.5), (9, float("-inf"))), 3),), "length"),
        Delta("", (), (), "error", "why", (TokenLogprob(1, -2.0, ()),)),
    ]
    error = HttpError(404, "no", param="model", code="c", headers={"Retry-After": "1"})
    encoded = [engine_messages.encode_delta(number, delta) for number, delta in enumerate(deltas)]
    data = engine_messages.pack(engine_messages.SUBMIT, 7, engine_messages.encode_requests([sent, sent]))
    data += engine_messages.pack(engine_messages.DELTAS, encoded)
    data += engine_messages.pack(engine_messages.ERROR, 1, engine_messages.encode_error(error))
    unpacker = engine_messages.Unpacker()
    received = [message for byte in data for message in unpacker.decode(bytes([byte]))]
    assert [message[0] for message in received] == [
        engine_messages.SUBMIT,
        engine_messages.DELTAS,
        engine_messages.ERROR,
    ]
    decoded, second = engine_messages.decode_requests(received[0][2])
    assert (
        decoded == second == sent
        and decoded.images is second.images
        and decoded.audio is not None
        and decoded.images is not None
    )
    np.testing.assert_array_equal(decoded.images, images)
    np.testing.assert_array_equal(decoded.audio.frames, audio.frames)
    assert list(map(engine_messages.decode_delta, received[1][1])) == list(enumerate(deltas))
    failure = engine_messages.decode_error(received[2][2])
    assert (failure.status, str(failure), failure.body(), dict(failure.headers)) == (
        404,
        "no",
        error.body(),
        {"Retry-After": "1"},
    )


def test_the_engine_does_not_wait_for_a_process_that_does_not_read() -> None:
    """More than the socket holds is sent once it reads, in order; after its end nothing is."""
    own_end, other_end = socket.socketpair()
    link, messages = Link(own_end, lambda: None), [b"%8d" % number * 200 for number in range(2000)]
    for message in messages:
        link.send(message)
    received = b""
    while len(received) < 3_200_000:
        received += other_end.recv(2**20)
    assert received == b"".join(messages)
    other_end.close()
    for message in messages:
        link.send(message)
    own_end.close()
    link.send(b"x")


@pytest.mark.slow
def test_counters_sum_over_processes() -> None:
    first = Counters.shared(2)
    second = first.of(1)
    assert first.add("sequences", 3) == 3 and second.add("sequences", 2) == 5
    second.add(404)
    second.add("stop")
    second.clear_gauges()
    assert first.total("sequences") == 3 and first.totals([200, 404]) == {404: 1}
    assert first.totals(["stop", "length"]) == {"stop": 1}
