"""Local checkpoints for the other processes of a run: a read-only server of files, and clients that read from it.

Each process serves its own folder. Address and token are exchanged over the key-value store of jax.distributed, which
is too small for the files themselves. Only the processes of the run know the token.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from maxhydra.record.checkpoint_manifest import MANIFEST, DamagedCheckpointError, digest_bytes, parse_manifest
from maxhydra.record.local_checkpoints import ARRAYS, INDEX, Part, Shard
from maxhydra.runtime.channel import HEADER, TOKEN_BYTES, ChannelClosedError, open_server, receive

T = TypeVar("T")

# Size in the header of a reply for a file that does not exist.
MISSING = 2**64 - 1
MAX_REQUEST = 2**14
# Silence after which a connection is given up. A peer that reads from a slow disk still sends within that time.
TIMEOUT_SECONDS = 60.0
CHUNK = 2**20


class TransferError(Exception):
    """A file could not be read from another process; the message names the process's address and the cause."""


class Address(NamedTuple):
    """Where the server of a process is, and the token that it requires."""

    host: str
    port: int
    token: str


class FileServer:
    """Serves the files below a folder, one thread per connection, until it is closed."""

    def __init__(self, root: Path, host: str):
        """`host` is the address under which other processes reach this one."""
        self._root, self._token = root.absolute(), secrets.token_bytes(TOKEN_BYTES)
        self._server = open_server(host, backlog=64)
        self.address = Address(host, self._server.getsockname()[1], self._token.hex())
        threading.Thread(target=self._accept, name="file server", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), name="file server", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError, ChannelClosedError, ValueError, KeyError, TypeError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(TIMEOUT_SECONDS)
            if not secrets.compare_digest(receive(link, TOKEN_BYTES), self._token):
                return
            # A client keeps its connection, maybe for hours between two saves.
            link.settimeout(None)
            while True:
                [size] = HEADER.unpack(receive(link, HEADER.size))
                if size > MAX_REQUEST:
                    return
                name, offset, count = json.loads(receive(link, size))
                self._reply(link, str(name), int(offset), None if count is None else int(count))

    def _reply(self, link: socket.socket, name: str, offset: int, count: int | None) -> None:
        path = Path(os.path.normpath(self._root / name))
        if not (path.is_relative_to(self._root) and path.is_file()):
            link.sendall(HEADER.pack(MISSING))
            return
        with open(path, "rb") as file:
            available = max(0, os.fstat(file.fileno()).st_size - offset)
            size = available if count is None else min(count, available)
            link.sendall(HEADER.pack(size))
            if size:
                link.sendfile(file, offset, size)


class FileClient:
    """Reads files of another process. Not for several threads at once."""

    def __init__(self, address: Address):
        self._address = address
        self._link: socket.socket | None = None

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """A part of a file, the whole by default. Raises FileNotFoundError and TransferError."""
        return b"".join(self._chunks(name, offset, size))

    def copy(self, name: str, path: Path) -> None:
        """Copy a file to a new local one. Raises FileNotFoundError, TransferError, and OSError of the local disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for chunk in self._chunks(name, 0, None):
                file.write(chunk)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _chunks(self, name: str, offset: int, size: int | None) -> Iterator[bytes]:
        remaining = self._request(name, offset, size)
        if remaining == MISSING:
            raise FileNotFoundError(f"{self._address.host}:{self._address.port} has no file {name}")
        while remaining:
            chunk = self._receive(min(CHUNK, remaining))
            remaining -= len(chunk)
            try:
                yield chunk
            except GeneratorExit:
                self.close()  # the rest of the reply is not read
                raise

    def _request(self, name: str, offset: int, size: int | None) -> int:
        content = json.dumps([name, offset, size]).encode()
        try:
            if self._link is None:
                self._link = socket.create_connection(self._address[:2], TIMEOUT_SECONDS)
                self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._link.sendall(bytes.fromhex(self._address.token))
            self._link.sendall(HEADER.pack(len(content)) + content)
        except OSError as error:
            raise self._failure(error) from error
        return int(HEADER.unpack(self._receive(HEADER.size))[0])

    def _receive(self, size: int) -> bytes:
        assert self._link is not None
        try:
            return receive(self._link, size)
        except ChannelClosedError as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> TransferError:
        self.close()
        return TransferError(f"cannot read from {self._address.host}:{self._address.port}: {error}")


class Place(NamedTuple):
    """A process that has a part on its disk, and the path of the part there."""

    process: int
    path: str


class PartReader:
    """Reads the parts of a step from the own disk or another process, verifies them, and counts the bytes."""

    def __init__(
        self, root: Path, own: Collection[int], peers: Sequence[Address | None], places: Sequence[Sequence[Place]]
    ):
        """`own` are the processes whose disk this process sees at `root`, `places` those of each part."""
        self._root, self._own = root, own
        self._peers, self._clients = peers, dict[int, FileClient]()
        self._places = [self._order(found) for found in places]
        self._local = self._remote = 0
        self.damages: list[str] = []
        """Descriptions of the damaged files that were replaced by copies."""

    def _order(self, places: Sequence[Place]) -> list[Place]:
        """Own disk first; of the others, each process begins with another one."""
        shift = max(self._own) % len(places)
        return sorted([*places[shift:], *places[:shift]], key=lambda place: place.process not in self._own)

    def read_index(self, part: Part) -> dict[str, Any]:
        """The verified index of a part."""

        def read(place: Place) -> dict[str, Any]:
            entry = parse_manifest(self._read(place, MANIFEST, 0, None)).files.get(INDEX)
            content = self._read(place, INDEX, 0, None)
            if entry is None or digest_bytes(content) != entry.digest:
                raise DamagedCheckpointError(INDEX, "has changed since it was written: its digest differs")
            return dict(json.loads(content))

        return self._first_intact(part.number, read)

    def read_shard(self, name: str, shard: Shard) -> bytes:
        """The verified content of a shard of an array."""

        def read(place: Place) -> bytes:
            content = self._read(place, f"{ARRAYS}/{name}", shard.offset, shard.size)
            if digest_bytes(content) != shard.digest:
                raise DamagedCheckpointError(f"{ARRAYS}/{name}", "has changed since it was written: its digest differs")
            return content

        return self._first_intact(shard.part, read)

    def _first_intact(self, number: int, read: Callable[[Place], T]) -> T:
        problem = ""
        for place in self._places[number]:
            try:
                return read(place)
            except (DamagedCheckpointError, TransferError, OSError) as error:
                problem = f"local checkpoint {place.path} of process {place.process} is damaged: {error}"
                self.damages.append(problem)
        raise DamagedCheckpointError(f"the part of process {number}", f"has no intact copy; {problem}")

    def _read(self, place: Place, name: str, offset: int, size: int | None) -> bytes:
        if place.process in self._own:
            with open(self._root / place.path / name, "rb") as file:
                file.seek(offset)
                content = file.read(-1 if size is None else size)
            self._local += len(content)
            return content
        address = self._peers[place.process]
        assert address is not None
        client = self._clients.setdefault(place.process, FileClient(address))
        content = client.read(f"{place.path}/{name}", offset, size)
        self._remote += len(content)
        return content

    def describe(self) -> str:
        return f"{self._local / 2**20:.1f} MiB from the own disk, {self._remote / 2**20:.1f} MiB from other hosts"

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def reachable_host(coordinator: str) -> str:
    """The address of this host on the network of process 0, whose host is `coordinator`."""
    family = socket.AF_INET6 if ":" in coordinator else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((coordinator, 9))  # sends nothing
        return str(probe.getsockname()[0])
