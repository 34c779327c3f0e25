"""The processes of the HTTP server, as the engine's process sees them: started, answered, replaced and stopped.

A thread per process reads its messages. The engine's thread sends the deltas of a call, one message to each process,
and never waits for one: another thread sends the bytes that a process does not receive at once.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from maxhydra.decode.openai_server.backend import FAST, Backend
from maxhydra.decode.openai_server.counters import Counters
from maxhydra.decode.openai_server.engine_messages import (
    CALL,
    CANCEL,
    DELTAS,
    ERROR,
    READY,
    RESULT,
    START,
    STOP,
    SUBMIT,
    Unpacker,
    decode_requests,
    encode_delta,
    encode_error,
    pack,
)
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.http_process import HttpSettings, run_http_process
from maxhydra.decode.openai_server.server import CLOSE_SECONDS
from maxhydra.decode.request import Delta, Handle, Request
from maxhydra.record.processes import spawn_context

log = logging.getLogger("maxhydra")
# Bytes that are read or sent at a time.
CHUNK = 2**20
# Threads for calls that take long: grammars, adapters, embeddings.
THREADS = 4
# Time for a process to exit after its last connection is closed.
EXIT_SECONDS = 5.0


class Link:
    """The socket to one process, and its sequences."""

    def __init__(self, pipe: socket.socket, on_ready: Callable[[], None]):
        self._pipe, self._on_ready = pipe, on_ready
        self._backend: Backend | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._handles: dict[int, Handle] = {}
        self._submitting: set[int] = set()
        """First sequences of the requests that other threads submit, and those of them that are cancelled."""
        self._cancelled: set[int] = set()
        self._deltas: deque[tuple[Any, ...]] = deque()
        self._unsent = bytearray()
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self._is_ended = False
        self.is_ready, self.problem = False, ""
        """Whether the process has loaded the tokenizer, or why it cannot."""

    def start(self, backend: Backend, pool: ThreadPoolExecutor) -> None:
        """Let the process accept connections; `pool`: for calls that take long."""
        self._backend, self._pool = backend, pool
        self.send(pack(START))

    def read(self) -> None:
        """Read messages until the process ends, then cancel its sequences. Closing the socket ends the process."""
        unpacker, buffer = Unpacker(), memoryview(bytearray(CHUNK))
        try:
            while count := self._pipe.recv_into(buffer):
                replies = [self._receive(kind, content) for kind, *content in unpacker.decode(buffer[:count])]
                self.send(b"".join(replies))
        except OSError:
            pass  # The process was killed.
        except Exception:
            log.exception("a message of an HTTP process cannot be read")
        with self._lock:
            self._is_ended = True
            handles = list(self._handles.values())
        for handle in handles:
            handle.cancel()
        self._pipe.close()

    def send(self, data: bytes) -> None:
        """Send without waiting for the process."""
        with self._send_lock:
            if not data or self._is_ended:
                return
            if self._unsent:
                self._unsent += data
                return
            try:
                sent = self._pipe.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # The process has ended, which `read` notices.
            if sent < len(data):
                self._unsent += data[sent:]
                threading.Thread(target=self._send_rest, daemon=True).start()

    def _send_rest(self) -> None:
        """Send the bytes that the process did not receive at once, and those added meanwhile."""
        with contextlib.suppress(OSError):
            while True:
                with self._send_lock:
                    part = bytes(self._unsent[:CHUNK])
                    if not part:
                        return
                sent = self._pipe.send(part)
                with self._send_lock:
                    del self._unsent[:sent]

    def flush(self) -> None:
        """Send the deltas of a call of the engine in one message."""
        with self._lock:
            if self._deltas:
                deltas = [self._deltas.popleft() for _ in range(len(self._deltas))]
                self.send(pack(DELTAS, deltas))

    def _receive(self, kind: int, content: Sequence[Any]) -> bytes:
        """Act on a message; return the reply."""
        if kind == READY:
            self.problem = content[0]
            self.is_ready = not self.problem
            self._on_ready()
            return b""
        if kind == CANCEL:
            self._cancel(content[0])
            return b""
        assert kind in (SUBMIT, CALL) and self._backend is not None and self._pool is not None
        number, name, values = content
        if kind == CALL:
            work, is_fast = partial(self._backend.call, name, values), name in FAST
        else:
            requests = decode_requests(values)
            work, is_fast = partial(self._submit, number, name, requests), not requests[0].grammar
        if is_fast:
            return _reply(number, work)
        if kind == SUBMIT:
            self._submitting.add(number)
        self._pool.submit(lambda: self.send(_reply(number, work)))
        return b""

    def _submit(self, first: int, field: str, requests: Sequence[Request]) -> None:
        assert self._backend is not None
        numbered: dict[int, Handle] = {}
        try:
            numbered = dict(enumerate(self._backend.submit(requests, field), first))
        finally:
            with self._lock:
                self._handles |= numbered
                is_cancelled = self._is_ended or first in self._cancelled
                self._submitting.discard(first)
                self._cancelled.discard(first)
        for number, handle in numbered.items():
            handle.listen(partial(self._post, number))
            if is_cancelled:
                handle.cancel()
        self.flush()

    def _cancel(self, numbers: Sequence[int]) -> None:
        with self._lock:
            if numbers[0] in self._submitting:
                self._cancelled.add(numbers[0])
            handles = [handle for number in numbers if (handle := self._handles.get(number)) is not None]
        for handle in handles:
            handle.cancel()

    def _post(self, number: int, delta: Delta) -> None:
        """Called in the engine's thread."""
        if delta.finish is not None:
            assert self._backend is not None
            self._backend.note_finish(delta)
            self._handles.pop(number, None)
        self._deltas.append(encode_delta(number, delta))


def _reply(number: int, work: Callable[[], Any]) -> bytes:
    try:
        return pack(RESULT, number, work())
    except HttpError as error:
        return pack(ERROR, number, encode_error(error))
    except Exception as error:
        log.exception("a call of an HTTP process failed")
        return pack(ERROR, number, encode_error(HttpError(500, f"the server failed: {type(error).__name__}")))


class ProcessManager:
    """The processes of one server, each of which has a thread here that starts it, reads from it and replaces it."""

    def __init__(self, count: int, listener: socket.socket, settings: HttpSettings):
        """Start the processes, which load the tokenizer; they accept connections once `run` is called."""
        self._listener, self._settings = listener, settings
        self._counters = Counters.shared(count)
        self._pool = ThreadPoolExecutor(THREADS, "calls")
        self._backend: Backend | None = None
        self._links: dict[int, Link] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._problem = ""
        self._is_stopping = False
        self._num_running = count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._change = asyncio.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._keep_running, args=(row,), daemon=True) for row in range(count)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "ProcessManager":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def run(self, backend: Backend, *, stop: asyncio.Event, on_serving: Callable[[], None]) -> None:
        """Serve until `stop` is set, then let running requests finish; RuntimeError if a process cannot be started."""
        self._loop = asyncio.get_running_loop()
        backend.add_flush(self._flush)
        with self._lock:
            self._backend = backend
            for link in self._links.values():
                link.start(backend, self._pool)
        waiting = asyncio.ensure_future(stop.wait())
        waiting.add_done_callback(lambda _: self._change.set())
        try:
            await self._wait_until(self._is_ready)
            on_serving()
            await self._wait_until(stop.is_set)
        finally:
            waiting.cancel()
        with self._lock:
            self._is_stopping = True
            # Clients that no process has accepted must not wait for one.
            self._listener.close()
            for link in self._links.values():
                link.send(pack(STOP))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.limits.drain + CLOSE_SECONDS + EXIT_SECONDS):
                await self._wait_until(lambda: self._num_running == 0)

    def close(self) -> None:
        """Kill the processes that have not ended."""
        with self._lock:
            self._is_stopping = True
            for process in self._processes.values():
                process.kill()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _is_ready(self) -> bool:
        with self._lock:
            return len(self._links) == len(self._threads) and all(link.is_ready for link in self._links.values())

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            if self._problem:
                raise RuntimeError(f"a process of the HTTP server cannot be started: {self._problem}")
            await self._change.wait()
            self._change.clear()

    def _notify(self) -> None:
        """Let `run` look at what has changed; called in any thread."""
        # Without a loop, `run` has not been called yet, or is over.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._change.set)

    def _flush(self) -> None:
        """Called in the engine's thread."""
        for link in list(self._links.values()):
            link.flush()

    def _keep_running(self, row: int) -> None:
        try:
            while (link := self._start(row)) is not None and self._follow(link, row):
                pass
        except OSError as error:
            self._problem = str(error)
        with self._lock:
            self._num_running -= 1
        self._notify()

    def _follow(self, link: Link, row: int) -> bool:
        """Read messages until a process ends; return True if it has to be replaced."""
        link.read()
        process = self._processes[row]
        process.kill()
        process.join()
        self._counters.of(row).clear_gauges()
        if self._is_stopping:
            return False
        if not link.is_ready:
            self._problem = link.problem or f"it ended with exit code {process.exitcode}"
            return False
        reason = "an HTTP process has ended with exit code %s: its requests have failed, and it is replaced"
        log.error(reason, process.exitcode)
        return True

    def _start(self, row: int) -> Link | None:
        """Start a process; None if the server stops."""
        with self._lock:
            if self._is_stopping:
                return None
            own_end, other_end = socket.socketpair()
            arguments = (other_end, self._listener, self._settings, self._counters.of(row))
            process = spawn_context.Process(target=run_http_process, args=arguments, name=f"http-{row}")
            process.start()
            other_end.close()
            self._processes[row], self._links[row] = process, (link := Link(own_end, self._notify))
            if self._backend is not None:
                link.start(self._backend, self._pool)
            return link
