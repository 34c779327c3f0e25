"""State shared by the files of one source: open handles, decoded groups, cached indices on disk."""

import dataclasses
import hashlib
import logging
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from maxhydra.data.files import partial_path
from maxhydra.data.formats.payload import decode
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.shuffle import GROUPS_PER_WINDOW

log = logging.getLogger("maxhydra")

V = TypeVar("V")

# Files kept open, well below the 1024 that many systems allow per process.
HANDLES = 256

# Groups of two shuffle windows are always cached: records are read in random order within a window, and windows overlap
# while reading ahead. Small groups are cached beyond that, for processes that read several streams.
GROUPS = 2 * GROUPS_PER_WINDOW
GROUP_BYTES = 2**30


class LruCache(Generic[V]):
    """Least-recently-used cache: `count` values, and more while their total weight is at most `size`."""

    def __init__(self, count: int, size: int = -1, weigh: Callable[[V], int] = lambda value: 0):
        self._count, self._size, self._weigh = count, size, weigh
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()
        self._key_locks: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, created once even if several threads request it at the same time."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            with self._lock:
                if key in self._values:
                    return self._values[key][0]
            value = make()
            self._store(key, value)
        return value

    def _store(self, key: Hashable, value: V) -> None:
        with self._lock:
            self._key_locks.pop(key, None)
            self._values[key] = value, self._weigh(value)
            self._weight += self._values[key][1]
            while len(self._values) > self._count and self._weight > self._size:
                _, (_, weight) = self._values.popitem(last=False)
                self._weight -= weight

    def forget(self, key: Hashable) -> None:
        """Remove a key, so that its value is created again on the next request."""
        with self._lock:
            if key in self._values:
                self._weight -= self._values.pop(key)[1]


@dataclasses.dataclass(frozen=True)
class FileCache:
    """Caches and decoding options shared by the files of one source."""

    cache_dir: Path
    columns: tuple[str, ...] | None
    """The only columns that will be read; None if unknown."""
    decode: Callable[[bytes], Record] = decode
    """Decoder of the record bytes in ArrayRecord and TFRecord files."""
    handles: LruCache[Any] = dataclasses.field(default_factory=lambda: LruCache(HANDLES))
    groups: LruCache["Group"] = dataclasses.field(
        default_factory=lambda: LruCache(GROUPS, GROUP_BYTES, lambda group: group.size)
    )

    def cached_index(self, path: Path, kind: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Load the index of a file from disk; built once per version of the file."""
        target = self.cache_dir / "index" / f"{version(path)}.{kind}.npy"
        if target.exists():
            stored: np.ndarray = np.load(target, mmap_mode="r", allow_pickle=False)
            return stored
        index = make()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = partial_path(target)
            with partial.open("wb") as file:
                np.save(file, index, allow_pickle=False)
            partial.rename(target)
        except OSError as error:
            log.warning("the index of %s cannot be cached: %s", path, error)
        return index


@dataclasses.dataclass(frozen=True)
class Group:
    """Records that were decoded together, in any form that single records can be taken from, and their bytes."""

    value: Any
    size: int


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A file that cannot be read at all: one bad record, so that it is reported, counted and skipped."""

    path: Path
    reason: str
    groups = None

    def __len__(self) -> int:
        return 1

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return [BadRecord(self.location(index), self.reason) for index in indices]

    def location(self, index: int) -> str:
        return f"{self.path}, the whole file"


def version(path: Path) -> str:
    """Name for the current version of a file."""
    details = path.stat()
    key = f"{path.resolve()} {details.st_size} {details.st_mtime_ns}"
    return f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{path.name}"


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory, read-only."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
