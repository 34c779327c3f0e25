"""Values from process 0 to all others: what only it knows, such as requests, files that it reads, and rewards.

Process 0 is the front end of a task that has clients or files: it reads the inputs, schedules the devices of all
processes, and writes the outputs. Values travel over TCP instead of a collective operation of jax, because that
is a device program: sent by one thread while another one dispatches the model's programs, it would be dispatched in a
different order in each process, and the processes would wait for each other forever.

With a single process, all functions return their argument. `Connection` is the other kind of link, over which processes
send messages in both directions (peers.py).
"""

import contextlib
import functools
import itertools
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed

from maxhydra.runtime.exits import EXIT_LOST

# Processes reach a channel at different times, after loading weights; if one dies, peers.py ends the others.
WAIT_MS = 24 * 3600 * 1000
HEADER = struct.Struct("!Q")
TOKEN_BYTES = 16
MAX_MESSAGE = 2**16
# Of a process that has not failed: no reason, exit code 0.
NO_ERROR = "", 0

Message = dict[str, Any]

_numbers = itertools.count()
_gathers = itertools.count()


class ChannelClosedError(RuntimeError):
    """The process at the other end has closed the connection, or has ended."""


def _identity(value: Any) -> Any:
    return value


def is_main() -> bool:
    """Whether this process is process 0, which reads inputs, decides and writes outputs for all."""
    return jax.process_index() == 0


def broadcast(
    value: Any = None, *, encode: Callable[[Any], Any] = _identity, decode: Callable[[Any], Any] = _identity
) -> Any:
    """The value of process 0, in every process. A collective call.

    Values are JSON and NumPy arrays, and tuples arrive as lists; `encode` and `decode` convert others.
    """
    channel = _default_channel()
    if not channel.is_shared:
        return value
    if not is_main():
        return decode(channel.share())
    channel.share(encode(value))
    return value


def gather(value: Any) -> list[Any]:
    """The values of all processes, by process index, in every process. A collective call, for small JSON values."""
    if jax.process_count() == 1:
        return [value]
    state: Any = distributed.global_state
    key = f"maxhydra/gather/{next(_gathers)}"
    state.client.key_value_set(f"{key}/{state.process_id}", json.dumps(value))
    indices = range(state.num_processes)
    return [json.loads(state.client.blocking_key_value_get(f"{key}/{index}", WAIT_MS)) for index in indices]


@functools.cache
def _default_channel() -> "Channel":
    return Channel()


class Channel:
    """An ordered stream of values from process 0. All processes open their channels in the same order."""

    def __init__(self) -> None:
        self._links: list[socket.socket] = []
        """In process 0 a connection to every other process, otherwise one to process 0."""
        if jax.process_count() == 1:
            return
        state: Any = distributed.global_state
        key = f"maxhydra/channel/{next(_numbers)}"
        host = coordinator_host(state)
        if is_main():
            self._links = _accept(host, key, state)
        else:
            port, token = json.loads(state.client.blocking_key_value_get(key, WAIT_MS))
            link = socket.create_connection((host, port))
            link.sendall(bytes.fromhex(token))
            self._links = [link]
        for link in self._links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_shared(self) -> bool:
        """Whether there are other processes."""
        return bool(self._links)

    def share(self, value: Any = None) -> Any:
        """The value of process 0, which sends it to the others; they wait for it, and their argument is ignored."""
        if not self._links:
            return value
        if is_main():
            # Arrays follow the JSON as bytes, in the order in which it names them.
            arrays: list[np.ndarray] = []
            content = json.dumps(
                value, default=functools.partial(_array_to_json, arrays), separators=(",", ":")
            ).encode()
            parts = [HEADER.pack(len(content)) + content, *(array.tobytes() for array in arrays)]
            for link in self._links:
                # A process that is gone is noticed and named by peers.py.
                with contextlib.suppress(OSError):
                    for part in parts:
                        link.sendall(part)
            return value
        [size] = HEADER.unpack(receive(self._links[0], HEADER.size))
        content = receive(self._links[0], size)
        return json.loads(content, object_hook=functools.partial(_array_from_json, self._links[0]))

    def close(self) -> None:
        """Close the connections; a process that waits for a value gets ChannelClosedError."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


class Connection:
    """JSON messages, one per line, over a socket, and the state of the process at the other end."""

    def __init__(self, link: socket.socket, index: int = -1, host: str = "unknown host"):
        self.link, self.index, self.host = link, index, host
        self.step, self.line = 0, ""
        self.heard_at = time.monotonic()
        self.has_left = self.is_warned = self.is_closed = False
        self.num_tasks, self.error = 0, NO_ERROR
        """Tasks that the process had begun when it left; the error with which it left, if any, and its exit code."""
        self._buffer = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send; a failure is noticed by the receiving side of the connection."""
        with contextlib.suppress(OSError), self._lock:
            self.link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Messages that have arrived; None if the connection is closed."""
        try:
            data = self.link.recv(2**14)
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if not data or len(self._buffer) > MAX_MESSAGE:
            return None
        self.heard_at, self.is_warned = time.monotonic(), False
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            return None

    @property
    def silence(self) -> float:
        return time.monotonic() - self.heard_at

    def __str__(self) -> str:
        return f"process {self.index} on {self.host}"

    @property
    def loss(self) -> tuple[str, int]:
        """Why the process is lost once the connection is closed, and the exit code of the others."""
        return self.error if self.error != NO_ERROR else (f"{self} is gone; {self.describe_last()}", EXIT_LOST)

    def describe_last(self) -> str:
        return f"last known step {self.step}" + (f", its last log line was: {self.line}" if self.line else "")


def coordinator_host(state: Any) -> str:
    """The host of process 0, from the state of jax.distributed."""
    host: str = state.coordinator_address.rpartition(":")[0].strip("[]")
    return host


def free_address() -> str | None:
    """An address on the host of process 0 for another cluster of the same hosts; None with a single process."""
    if jax.process_count() == 1:
        return None
    host = coordinator_host(distributed.global_state)
    with open_server(host, backlog=1) as server:
        port = server.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_server(host: str, *, backlog: int) -> socket.socket:
    """A server of process 0 at a free port, reachable from other hosts unless `host` is local."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_local = host in ("127.0.0.1", "localhost", "::1")
    return socket.create_server((host if is_local else "", 0), family=family, backlog=backlog)


def _accept(host: str, key: str, state: Any) -> list[socket.socket]:
    """Connections of all other processes, which find address and token in jax's key-value store."""
    token, others = secrets.token_bytes(TOKEN_BYTES), state.num_processes - 1
    links: list[socket.socket] = []
    with open_server(host, backlog=others) as server:
        state.client.key_value_set(key, json.dumps([server.getsockname()[1], token.hex()]))
        while len(links) < others:
            link, _ = server.accept()
            with contextlib.suppress(OSError, ChannelClosedError):
                link.settimeout(10)
                if secrets.compare_digest(receive(link, TOKEN_BYTES), token):
                    link.settimeout(None)
                    links.append(link)
                    continue
            link.close()
    return links


def receive(link: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises ChannelClosedError if the connection is closed before, or times out."""
    content = bytearray(size)
    view, filled = memoryview(content), 0
    while filled < size:
        try:
            count = link.recv_into(view[filled:])
        except OSError:
            count = 0
        if not count:
            raise ChannelClosedError("the process at the other end of the connection has ended")
        filled += count
    return bytes(content)


def _array_to_json(arrays: list[np.ndarray], value: Any) -> Any:
    """What JSON has of an array, which is added to `arrays`."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError(f"{type(value).__name__} cannot be sent to another process")
    arrays.append(value)
    return {"array": len(arrays), "dtype": value.dtype.str, "shape": value.shape}


def _array_from_json(link: socket.socket, value: dict[str, Any]) -> Any:
    """The array whose bytes come next, or another JSON object."""
    if value.keys() != {"array", "dtype", "shape"}:
        return value
    dtype = np.dtype(value["dtype"])
    return np.frombuffer(receive(link, math.prod(value["shape"]) * dtype.itemsize), dtype).reshape(value["shape"])
