"""HTTP/1.1 on the wire: a strict request parser, and a writer of responses and event streams.

Strict against request smuggling, in which a proxy and a server parse one request differently: CRLF line ends only, one
Content-Length, no folded header lines, no transfer encodings in requests.
"""

import asyncio
import dataclasses
import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

# Maximum total bytes and number of the headers of a request.
MAX_HEAD, MAX_HEADERS = 32 * 1024, 100
# Bytes of a rejected body that are read and discarded, so that the client gets to read the error.
MAX_DISCARDED = 64 * 2**20
WRITE_BUFFER = 256 * 1024
# Header of errors that the client may retry.
RETRY = {"Retry-After": "1"}
JSON_TYPE = {"Content-Type": "application/json"}

_REQUEST = re.compile(r"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_SINGLE = ("host", "content-length", "content-type", "authorization", "transfer-encoding", "expect")


class HttpError(Exception):
    """An error response: status, message, and the request field it refers to."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Return the error as an OpenAI error object."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class RequestHead:
    """Request line and headers; header names are lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    is_http11: bool
    """False: HTTP/1.0."""

    @property
    def keeps_alive(self) -> bool:
        connection = self.headers.get("connection", "").lower()
        return "close" not in connection if self.is_http11 else "keep-alive" in connection

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", "0"))


class WatchedReader(asyncio.StreamReader):
    """A stream reader with a callback for when the client disconnects, even while no read is pending."""

    _buffer: bytearray

    def __init__(self) -> None:
        super().__init__(limit=MAX_HEAD)
        self.is_disconnected = False
        self.on_disconnect: Callable[[], object] | None = None

    @property
    def has_head(self) -> bool:
        """Whether `readuntil` an empty line returns at once."""
        return b"\r\n\r\n" in self._buffer

    def has_bytes(self, count: int) -> bool:
        """Whether `readexactly` this many returns at once."""
        return len(self._buffer) >= count

    def feed_eof(self) -> None:
        self._disconnect()
        super().feed_eof()

    def set_exception(self, exc: Exception) -> None:
        self._disconnect()
        super().set_exception(exc)

    def _disconnect(self) -> None:
        self.is_disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()


def parse_head(data: bytes) -> RequestHead:
    """Parse the request line and headers, up to the empty line."""
    first, *rest = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None:
        raise HttpError(400, "the request line is not valid HTTP/1.1")
    if len(rest) > MAX_HEADERS:
        raise HttpError(431, f"the request has more than {MAX_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in rest:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise HttpError(400, "a header is malformed")
        name = header[1].lower()
        if name in headers and name in _SINGLE:
            raise HttpError(400, f"the header {name} occurs twice")
        headers[name] = f"{headers[name]}, {header[2]}" if name in headers else header[2]
    if "transfer-encoding" in headers:
        raise HttpError(411, "send the body with Content-Length, not with Transfer-Encoding")
    if not re.fullmatch(r"[0-9]{1,15}", headers.get("content-length", "0")):
        raise HttpError(400, "Content-Length is not a number")
    if request[3] == "1" and "host" not in headers:
        raise HttpError(400, "the header Host is missing")
    return RequestHead(request[1], request[2].partition("?")[0], headers, request[3] == "1")


class Connection:
    """One client connection. Every wait has a timeout: a client that sends or reads too slowly is disconnected."""

    def __init__(self, reader: WatchedReader, writer: asyncio.StreamWriter, *, timeout: float):
        self.reader = reader
        self._reader, self._writer, self._timeout = reader, writer, timeout
        self._is_chunked = False
        self.has_started = False
        """True once the response to the current request has started, so that no error response is possible."""
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER)

    @property
    def is_local(self) -> bool:
        """Whether the client is on this machine."""
        return ipaddress.ip_address(self._writer.get_extra_info("peername")[0].partition("%")[0]).is_loopback

    async def read_head(self, idle: float) -> RequestHead | None:
        """Read the next request head; None if no request starts within `idle` seconds."""
        self.has_started = False
        first = b""
        try:
            async with asyncio.timeout(idle) as limit:
                first = await self._reader.readexactly(1)
                if not self._reader.has_head:
                    limit.reschedule(asyncio.get_running_loop().time() + self._timeout)
                return parse_head(first + await self._reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            raise HttpError(431, f"the headers exceed {MAX_HEAD} bytes") from None
        except TimeoutError:
            if not first:
                return None
            raise HttpError(408, f"the request was not received within {self._timeout:g} s") from None
        except asyncio.IncompleteReadError:
            if not first:
                return None
            raise

    async def read_body(self, head: RequestHead) -> bytes:
        if head.headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._reader.has_bytes(head.length):
            return await self._reader.readexactly(head.length)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._reader.readexactly(head.length)
        except TimeoutError:
            raise HttpError(408, f"the request was not received within {self._timeout:g} s") from None

    async def discard_body(self, head: RequestHead) -> None:
        """Read and discard a rejected body: a client that is disconnected while sending never reads the response."""
        remaining = min(head.length, MAX_DISCARDED)
        async with asyncio.timeout(self._timeout):
            while remaining and (data := await self._reader.read(min(remaining, 2**16))):
                remaining -= len(data)

    async def send(self, status: int, body: bytes, *, headers: Mapping[str, str]) -> None:
        """Send a complete response."""
        self.has_started = True
        self._writer.write(_format_head(status, {**headers, "Content-Length": str(len(body))}) + body)
        await self._drain()

    async def send_json(self, status: int, value: Any, *, headers: Mapping[str, str]) -> None:
        await self.send(status, _dump(value), headers={**JSON_TYPE, **headers})

    async def start_events(self, head: RequestHead) -> None:
        """Start a response of server-sent events, whose length is unknown."""
        self.has_started, self._is_chunked = True, head.is_http11
        length = {"Transfer-Encoding": "chunked"} if head.is_http11 else {"Connection": "close"}
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", **length}
        self._writer.write(_format_head(200, headers))
        await self._drain()

    async def send_events(self, values: list[Any]) -> None:
        """Send events in one chunk, each a JSON value or plain text; a value with a type is an event of that name."""
        # An empty chunk would end the stream.
        if not values:
            return
        data = "".join(map(_format_event, values)).encode(errors="replace")
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data)
        await self._drain()

    async def end_events(self) -> None:
        if self._is_chunked:
            self._writer.write(b"0\r\n\r\n")
            await self._drain()

    async def close(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(self._timeout):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()

    async def _drain(self) -> None:
        """Wait while the client reads more slowly than it is sent to; most have nothing left to read."""
        if not self._writer.transport.get_write_buffer_size():
            return
        async with asyncio.timeout(self._timeout):
            await self._writer.drain()


def dump_slices(value: Any) -> bytes:
    """Encode a response in slices: json.dumps of a million log-probabilities would stop all other threads."""
    return b"".join(_slices(value, 4))


def _slices(value: Any, depth: int) -> Iterator[bytes]:
    if depth and isinstance(value, dict):
        for number, (key, item) in enumerate(value.items()):
            yield b"%s%s: " % (b", " if number else b"{", _dump(key))
            yield from _slices(item, depth - 1)
        yield b"}" if value else b"{}"
    elif depth and isinstance(value, list):
        for number, item in enumerate(value):
            yield b", " if number else b"["
            yield from _slices(item, depth - 1)
        yield b"]" if value else b"[]"
    else:
        yield _dump(value)


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace")


def _format_event(value: Any) -> str:
    if isinstance(value, str):
        return f"data: {value}\n\n"
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _format_head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")
