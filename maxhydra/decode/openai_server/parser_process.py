"""A process that parses, renders and tokenizes large request bodies, so that no other client waits for them.

json.loads, chat templates and tokenizers hold the interpreter for up to 30 ms at a time. The process runs at a lower
priority than the server, starts with the first large body, and is replaced if it exits or takes too long. Bodies travel
as they were received and results as JSON and token ids: nothing that a client has influenced is unpickled.
"""

import array
import asyncio
import dataclasses
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from maxhydra.config.schema.decode import Sampling
from maxhydra.decode.openai_server.counters import Counters
from maxhydra.decode.openai_server.encoder_settings import EncoderSettings
from maxhydra.decode.openai_server.http11 import RETRY, HttpError
from maxhydra.decode.openai_server.request_schema import CompletionRequest, ServerDefaults, encode_prompts, parse
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.record.processes import exit_with_parent, ignore_run_signals, limit_memory, spawn_context

# Total bytes of large bodies that are being read or parsed; one body may have more.
MAX_PENDING = 64 * 2**20
# Limits of one body. Tokenizing 4 MiB takes about 4 s on a slow core; starting the process takes a few seconds.
PARSE_SECONDS, START_SECONDS = 30.0, 120.0
MEMORY = 8 * 2**30
# Added to the niceness: the event loop gets a core first.
NICENESS = 10


class ParserProcess:
    """Parses large bodies one after the other in a child process."""

    def __init__(self, prompts: PromptEncoder, defaults: ServerDefaults, counters: Counters):
        self._settings, self._defaults, self._counters = EncoderSettings.of(prompts), defaults, counters
        self._thread = ThreadPoolExecutor(1, "parser")
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._is_closed = False

    def reserve(self, size: int) -> None:
        """Admit a body of `size` bytes, before it is read; HttpError with status 429 if too many are pending."""
        total = self._counters.add("large_bytes", size)
        if size < total > MAX_PENDING:
            self.release(size)
            reason = f"{(total - size) / 2**20:.1f} MiB of large requests are being read; retry later"
            raise HttpError(429, reason, code="too_many_large_requests", headers=RETRY)

    def release(self, size: int) -> None:
        self._counters.add("large_bytes", -size)

    async def parse(self, body: bytes, *, is_chat: bool) -> CompletionRequest:
        """Return the request with its prompts as token ids; HttpError as from `request_schema.parse`."""
        reply = await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, body, is_chat)
        return _decode_reply(reply)

    def close(self) -> None:
        """Kill the process; a body that is being parsed gets an error."""
        with self._lock:
            self._is_closed = True
            self._kill()
        self._thread.shutdown(cancel_futures=True)

    def _exchange(self, body: bytes, is_chat: bool) -> bytes:
        """Send a body to the process and wait for the reply; runs in the only thread that uses the pipe."""
        try:
            pipe = self._running_pipe() or self._start()
            pipe.send_bytes(b"chat" if is_chat else b"text")
            pipe.send_bytes(body)
            return self._receive(pipe, PARSE_SECONDS, f"was not parsed within {PARSE_SECONDS:g} s")
        except (EOFError, OSError):
            self._stop()
            raise HttpError(500, "the process that parses large requests ended unexpectedly") from None

    def _running_pipe(self) -> Connection | None:
        """The pipe to the process; None if it was not started yet, or was killed while it had nothing to do."""
        if self._process is not None and not self._process.is_alive():
            self._stop()
        return self._pipe

    def _receive(self, pipe: Connection, seconds: float, failure: str) -> bytes:
        if not pipe.poll(seconds):
            self._stop()
            raise HttpError(400, f"the body {failure}; send a smaller one", code="too_slow_to_parse")
        return pipe.recv_bytes()

    def _start(self) -> Connection:
        with self._lock:
            if self._is_closed:
                raise HttpError(503, "the server is shutting down", headers=RETRY)
            pipe, child_end = spawn_context.Pipe()
            self._process = spawn_context.Process(
                target=_serve, args=(child_end, self._settings, self._defaults), daemon=True
            )
            self._process.start()
            child_end.close()
            self._pipe = pipe
        if problem := self._receive(pipe, START_SECONDS, "could not be parsed: the parser did not start").decode():
            self._stop()
            raise HttpError(500, problem)
        return pipe

    def _stop(self) -> None:
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None and not self._is_closed:
            # At shutdown, another thread may be waiting for the pipe, which the end of the process has broken.
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, settings: EncoderSettings, defaults: ServerDefaults) -> None:
    """Main of the process: reply to bodies until the server closes the pipe."""
    ignore_run_signals()
    exit_with_parent()
    os.nice(NICENESS)
    limit_memory(MEMORY)
    encoder, problem = settings.load()
    pipe.send_bytes(problem.encode(errors="replace"))
    while encoder is not None:
        try:
            kind, body = pipe.recv_bytes(), pipe.recv_bytes()
            pipe.send_bytes(_reply(body, encoder, defaults, is_chat=kind == b"chat"))
        except (EOFError, OSError):
            return


def _reply(body: bytes, encoder: PromptEncoder, defaults: ServerDefaults, *, is_chat: bool) -> bytes:
    try:
        request = parse(body, defaults, is_chat=is_chat)
        return _encode_reply(request, encode_prompts(request, encoder, defaults.max_context))
    except MemoryError:
        return _encode_error(HttpError(400, f"the body needs more than {MEMORY / 2**30:g} GiB of memory to parse"))
    except HttpError as error:
        return _encode_error(error)


def _encode_reply(request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> bytes:
    fields = dataclasses.asdict(dataclasses.replace(request, messages=[], prompts=[]))
    head = json.dumps({**fields, "lengths": [len(prompt) for prompt in prompts]}).encode()
    ids = b"".join(array.array("i", prompt).tobytes() for prompt in prompts)
    return len(head).to_bytes(4, "little") + head + ids


def _encode_error(error: HttpError) -> bytes:
    fields = {"status": error.status, "message": str(error), "param": error.param, "code": error.code}
    head = json.dumps({"error": fields}).encode()
    return len(head).to_bytes(4, "little") + head


def _decode_reply(reply: bytes) -> CompletionRequest:
    start = 4 + int.from_bytes(reply[:4], "little")
    fields: dict[str, Any] = json.loads(reply[4:start])
    if (error := fields.get("error")) is not None:
        raise HttpError(error["status"], error["message"], param=error["param"], code=error["code"])
    ids = array.array("i", reply[start:])
    prompts, position = [], 0
    for length in fields.pop("lengths"):
        prompts.append(ids[position : position + length].tolist())
        position += length
    return CompletionRequest(**{**fields, "sampling": Sampling(**fields["sampling"]), "prompts": prompts})
