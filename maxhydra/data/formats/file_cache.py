"""What the files of one source share while they are read: open handles, decoded groups, a folder for indices."""

import dataclasses
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from maxhydra.data.files import partial_path
from maxhydra.data.formats.payload import decode
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.shuffle import GROUPS_TOGETHER

log = logging.getLogger("maxhydra")

V = TypeVar("V")

# Files held open at a time, well under the 1024 that many systems allow a process.
HANDLES = 256

# Groups of two lots are kept whatever their size, since records are read in random order from a lot, and lots overlap
# while reading ahead. More are kept while they are small, for processes that run several streams.
GROUPS = 2 * GROUPS_TOGETHER
GROUP_BYTES = 2**30


class LruCache(Generic[V]):
    """The values used last: `count` of them, and more as long as together they weigh less than `size`."""

    def __init__(self, count: int, size: int = -1, weigh: Callable[[V], int] = lambda value: 0):
        self._count, self._size, self._weigh = count, size, weigh
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made once though several threads ask for it at a time."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    return self._values[key][0]
            value = make()
            self._keep(key, value)
        return value

    def _keep(self, key: Hashable, value: V) -> None:
        with self._lock:
            self._making.pop(key, None)
            self._values[key] = value, self._weigh(value)
            self._weight += self._values[key][1]
            while len(self._values) > self._count and self._weight > self._size:
                _, (_, weight) = self._values.popitem(last=False)
                self._weight -= weight

    def forget(self, key: Hashable) -> None:
        """Make the value of a key anew the next time."""
        with self._lock:
            if key in self._values:
                self._weight -= self._values.pop(key)[1]


@dataclasses.dataclass(frozen=True)
class FileCache:
    """What the files of one source share."""

    cache: Path
    columns: tuple[str, ...] | None
    """The only columns that will be asked for; None where that is not known."""
    decode: Callable[[bytes], Record] = decode
    """What makes a record of the bytes that ArrayRecord and TFRecord files hold."""
    handles: LruCache[Any] = dataclasses.field(default_factory=lambda: LruCache(HANDLES))
    groups: LruCache["Group"] = dataclasses.field(
        default_factory=lambda: LruCache(GROUPS, GROUP_BYTES, lambda group: group.size)
    )

    def cached_index(self, path: Path, kind: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """An index of a file, made once for each version of it."""
        target = self.cache / "index" / f"{version(path)}.{kind}.npy"
        if target.exists():
            stored: np.ndarray = np.load(target, mmap_mode="r", allow_pickle=False)
            return stored
        made = make()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = partial_path(target)
            with partial.open("wb") as file:
                np.save(file, made, allow_pickle=False)
            partial.rename(target)
        except OSError as error:
            log.warning("the index of %s is not kept: %s", path, error)
        return made


@dataclasses.dataclass(frozen=True)
class Group:
    """Records that were read together: whatever the format can get single ones from, and its size in bytes."""

    value: Any
    size: int


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A file of which nothing can be read: one bad record, so that it is named, counted and passed over."""

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
    """A name for a file as it is now."""
    details = path.stat()
    key = f"{path.resolve()} {details.st_size} {details.st_mtime_ns}"
    return f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{path.name}"
