"""The asyncio server: connection limits, timeouts, client disconnects, and graceful shutdown."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import resource
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.decode.openai_server.http11 import RETRY, Connection, HttpError, RequestHead, WatchedReader
from maxhydra.decode.openai_server.routes import Service

log = logging.getLogger("maxhydra")
BACKLOG = 1024
# Time that a process with more connections than another one leaves it to accept the next.
FAIR_SECONDS = 0.002
# Time without accepting after an error, such as too many open files.
RETRY_SECONDS = 1.0
# Time for cancelled connections to close.
CLOSE_SECONDS = 5.0
ACCEPT_SECONDS = 0.01
# A client that has closed its sending side may still read the response to a request that is served in this time.
HALF_CLOSED_SECONDS = 0.05
# A small request waits for other threads about ten times; with Python's 5 ms each, a client that sends large requests
# without pause would delay it by 50 ms.
SWITCH_SECONDS = 0.0005
# Open files in addition to connections: weights, pipes, and connections that are being rejected.
RESERVED_FILES = 512


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the server; see `config.schema.tasks.serve`. Sizes in bytes, times in seconds."""

    max_body: int
    max_connections: int
    timeout: float
    keep_alive: float
    drain: float


def listen(host: str, port: int) -> socket.socket:
    """Bind the port; ConfigError if that fails. Called before anything slow."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
    except OSError as error:
        raise ConfigError(Problem("task.host", f"cannot be resolved: {error.strerror}", value=host)) from None
    server = socket.socket(family, kind, protocol)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        server.bind(address)
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(Problem("task.host", "is not an address of this machine", value=host)) from None
        reason = f"cannot be bound: {error.strerror}"
        hint = "choose another port, or 0 for any free one"
        raise ConfigError(Problem("task.port", reason, value=port, hint=hint)) from None
    return server


def allow_connections(count: int) -> None:
    """Raise the soft limit of open files to what `count` connections need; ConfigError if the hard limit is lower.

    At the limit, a server could not even accept a connection to reject it, and clients would wait.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (OSError, ValueError):
        reason = f"needs {needed} open files, but this process may only have {hard} (ulimit -Hn)"
        accepted = f"1 to {hard - RESERVED_FILES}" if hard > RESERVED_FILES else ""
        hint = f"raise the limit of open files to {needed}, or set task.max_connections lower"
        problem = Problem("task.max_connections", reason, value=count, accepted=accepted, hint=hint)
        raise ConfigError(problem) from None


async def serve(
    listener: socket.socket,
    service: Service,
    limits: Limits,
    *,
    stop: asyncio.Event,
    on_serving: Callable[[], None] = lambda: None,
) -> None:
    """Serve until `stop` is set, then let running requests finish for up to limits.drain seconds."""
    on_serving()
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        await _Server(service, limits).run(listener, stop)
    finally:
        sys.setswitchinterval(before)


class _Server:
    def __init__(self, service: Service, limits: Limits):
        self._service, self._limits, self._counters = service, limits, service.counters
        self._accepting: set[asyncio.Task[Any]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def run(self, listener: socket.socket, stop: asyncio.Event) -> None:
        self._stop = stop
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        loop.add_reader(listener, self._accept_in_turn, listener)
        await stop.wait()
        loop.remove_reader(listener)
        listener.close()
        # Connections that were accepted get a response.
        await asyncio.sleep(ACCEPT_SECONDS)
        for task in self._connections - self._busy:
            task.cancel()
        if self._busy:
            await asyncio.wait(self._busy, timeout=self._limits.drain)
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=CLOSE_SECONDS)

    def _accept_in_turn(self, listener: socket.socket) -> None:
        """Accept a connection, but let a process with fewer connections be first."""
        if self._counters.own("connections") > self._counters.least("connections"):
            self._pause(listener, FAIR_SECONDS)
        else:
            self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("no connection can be accepted: %s", error)
            return self._pause(listener, RETRY_SECONDS)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        task = loop.create_task(_connect(loop, self._protocol, connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        """Accept no connection for some time, then one in any case."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)

        def resume() -> None:
            if not self._stop.is_set():
                loop.add_reader(listener, self._accept_in_turn, listener)
                self._accept(listener)

        loop.call_later(seconds, resume)

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        reader = WatchedReader()
        return asyncio.StreamReaderProtocol(reader, self._start_connection)

    def _start_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(reader, WatchedReader)
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._connections.add(task)
        self._counters.add("connections")
        task.add_done_callback(self._end_connection)

    def _end_connection(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._counters.add("connections", -1)

    async def _connection(self, reader: WatchedReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, timeout=self._limits.timeout)
        task = asyncio.current_task()
        assert task is not None
        idle = self._limits.timeout
        try:
            if self._counters.total("connections") > self._limits.max_connections:
                reason = f"more than task.max_connections={self._limits.max_connections} connections are open"
                await self._send_error(connection, HttpError(503, reason, headers=RETRY), close=True)
                return
            while await self._request(connection, task, idle):
                idle = self._limits.keep_alive
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            # The client has disconnected, or is too slow to receive an error.
            writer.transport.abort()
        except asyncio.CancelledError:
            # Shutdown, after running requests had their time to finish.
            writer.transport.abort()
        finally:
            self._busy.discard(task)
            await connection.close()

    async def _request(self, connection: Connection, task: asyncio.Task[None], idle: float) -> bool:
        """Serve one request; return True if the connection stays open for another."""
        head = None
        try:
            head = await connection.read_head(idle)
            if head is None:
                return False
            self._busy.add(task)
            return await self._handle(connection, head)
        except HttpError as error:
            # The body was not read or the request is not HTTP, so the next request cannot be located: close.
            await self._send_error(connection, error, close=True)
            if head is not None and head.length and "expect" not in head.headers:
                await connection.discard_body(head)
            return False
        finally:
            self._busy.discard(task)

    async def _handle(self, connection: Connection, head: RequestHead) -> bool:
        if self._stop.is_set():
            raise HttpError(503, "the server is shutting down", headers=RETRY)
        self._service.admit(head)
        if head.length > self._limits.max_body:
            size = f"{head.length / 2**20:.1f} MiB, the limit is task.max_body_mib={self._limits.max_body / 2**20:g}"
            raise HttpError(413, f"the body is too large: {size}", code="body_too_large")
        with ExitStack() as pending:
            self._service.admit_body(head, pending)
            body = await connection.read_body(head)
            is_done = await self._respond(connection, head, self._service.handle(head, body, connection, pending))
        return is_done and head.keeps_alive and head.is_http11 and not self._stop.is_set()

    async def _respond(self, connection: Connection, head: RequestHead, response: Coroutine[Any, Any, None]) -> bool:
        """Run the coroutine that sends the response; return True if a complete response was sent."""
        try:
            return await _run_unless_disconnected(connection, response)
        except HttpError as error:
            return await self._send_error(connection, error, close=not head.keeps_alive)
        except (OSError, TimeoutError):
            raise
        except Exception as error:
            log.exception("a request to %s failed", head.path)
            failure = HttpError(500, f"the server failed: {type(error).__name__}")
            return await self._send_error(connection, failure, close=not head.keeps_alive)

    async def _send_error(self, connection: Connection, error: HttpError, *, close: bool) -> bool:
        """Send an error response; return False if a response has started, so that the connection must be closed."""
        if connection.has_started:
            return False
        self._service.count(error.status)
        headers = {**error.headers, **({"Connection": "close"} if close else {})}
        await connection.send_json(error.status, error.body(), headers=headers)
        return True


async def _connect(
    loop: asyncio.AbstractEventLoop, protocol: Callable[[], asyncio.BaseProtocol], connection: socket.socket
) -> None:
    # The client may have disconnected already.
    with contextlib.suppress(OSError):
        await loop.connect_accepted_socket(protocol, connection)


async def _run_unless_disconnected(connection: Connection, coroutine: Coroutine[Any, Any, None]) -> bool:
    """Run a coroutine and cancel it if the client disconnects; return True if it completed.

    It runs in the task of the connection, so that a small request needs no second one.
    """
    task, reader, loop = asyncio.current_task(), connection.reader, asyncio.get_running_loop()
    assert task is not None
    timers: list[asyncio.TimerHandle] = []
    reader.on_disconnect = lambda: timers.append(loop.call_later(HALF_CLOSED_SECONDS, task.cancel))
    if reader.is_disconnected:
        reader.on_disconnect()
    try:
        await coroutine
    except asyncio.CancelledError:
        # A shutdown cancels the task too; the connection is closed in both cases.
        if not timers or task.uncancel():
            raise
        return False
    finally:
        reader.on_disconnect = None
        for timer in timers:
            timer.cancel()
    return True
