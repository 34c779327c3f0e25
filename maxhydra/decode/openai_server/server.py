"""Listens, keeps connections within limits, notices clients that hang up, and ends without losing a request."""

import asyncio
import dataclasses
import errno
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.decode.openai_server.http11 import RETRY, Connection, HttpError, RequestHead, WatchedReader
from maxhydra.decode.openai_server.routes import Service

log = logging.getLogger("maxhydra")
BACKLOG = 512
# Left to connections after they were told to end.
LAST_SECONDS = 5.0
SETTLE_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Limits:
    """As `config.tasks.serve` documents them; sizes in bytes, times in seconds."""

    max_body: int
    max_connections: int
    timeout: float
    keep_alive: float
    drain: float


def listen(host: str, port: int) -> socket.socket:
    """Take the port, before anything that takes long; ConfigError where that cannot be."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except OSError as error:
        raise ConfigError(Problem("task.host", f"is no address: {error.strerror}", value=host)) from None
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
        reason = f"cannot be listened on: {error.strerror}"
        hint = "choose another, or 0 for any that is free"
        raise ConfigError(Problem("task.port", reason, value=port, hint=hint)) from None
    return server


async def serve(listener: socket.socket, service: Service, limits: Limits, *, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then let what is under way finish for limits.drain seconds."""
    await _Server(service, limits).run(listener, stop)


class _Server:
    def __init__(self, service: Service, limits: Limits):
        self._service, self._limits = service, limits
        self._connections: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def run(self, listener: socket.socket, stop: asyncio.Event) -> None:
        self._stop = stop
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._protocol, sock=listener)
        await stop.wait()
        # Closed while it takes in a connection, asyncio's server would forget that one's socket.
        loop.remove_reader(listener)
        await asyncio.sleep(SETTLE_SECONDS)
        server.close()
        for task in self._connections - self._busy:
            task.cancel()
        if self._busy:
            await asyncio.wait(self._busy, timeout=self._limits.drain)
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=LAST_SECONDS)

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        reader = WatchedReader()
        return asyncio.StreamReaderProtocol(reader, self._begin)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(reader, WatchedReader)
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: WatchedReader, writer: asyncio.StreamWriter) -> None:
        link = Connection(reader, writer, timeout=self._limits.timeout)
        task = asyncio.current_task()
        assert task is not None
        idle = self._limits.timeout
        try:
            if len(self._connections) > self._limits.max_connections:
                reason = f"there are over task.max_connections={self._limits.max_connections} connections"
                await self._refuse(link, HttpError(503, reason, headers=RETRY), close=True)
                return
            while await self._request(link, task, idle):
                idle = self._limits.keep_alive
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            # The client is gone, or too slow to be told anything.
            writer.transport.abort()
        except asyncio.CancelledError:
            # The server ends; what is under way was given its time.
            writer.transport.abort()
        finally:
            self._busy.discard(task)
            await link.close()

    async def _request(self, link: Connection, task: asyncio.Task[None], idle: float) -> bool:
        """Serve one request; whether the connection is kept for another."""
        head = None
        try:
            head = await link.read_head(idle)
            if head is None:
                return False
            self._busy.add(task)
            return await self._answered(link, head)
        except HttpError as error:
            # The body was not read, or this is no HTTP at all: what follows cannot be told from it.
            await self._refuse(link, error, close=True)
            if head is not None and head.length and "expect" not in head.headers:
                await link.discard_body(head)
            return False
        finally:
            self._busy.discard(task)

    async def _answered(self, link: Connection, head: RequestHead) -> bool:
        if self._stop.is_set():
            raise HttpError(503, "the server is ending", headers=RETRY)
        self._service.admit(head)
        if head.length > self._limits.max_body:
            size = f"{head.length / 2**20:.1f} MiB, over task.max_body_mib={self._limits.max_body / 2**20:g}"
            raise HttpError(413, f"the body has {size}", code="body_too_large")
        body = await link.read_body(head)
        try:
            is_done = await _unless_gone(link, self._service.answer(head, body, link))
        except HttpError as error:
            is_done = await self._refuse(link, error, close=not head.keeps_alive)
        except (OSError, TimeoutError):
            raise
        except Exception as error:
            log.exception("a request to %s failed", head.path)
            failure = HttpError(500, f"the server failed: {type(error).__name__}")
            is_done = await self._refuse(link, failure, close=not head.keeps_alive)
        return is_done and head.keeps_alive and head.is_modern and not self._stop.is_set()

    async def _refuse(self, link: Connection, error: HttpError, *, close: bool) -> bool:
        """Answer by an error; False where another answer has begun, and the connection is of no more use."""
        if link.has_begun:
            return False
        self._service.count(error.status)
        headers = {**error.headers, **({"Connection": "close"} if close else {})}
        await link.send_json(error.status, error.body(), headers=headers)
        return True


async def _unless_gone(link: Connection, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, and cancel it as soon as the client hangs up; whether it was done."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(link.gone.wait())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        is_done = working.done()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait({working})
    if not working.cancelled() and (error := working.exception()) is not None:
        raise error
    return is_done
