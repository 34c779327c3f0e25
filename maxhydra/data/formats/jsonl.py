"""JSON Lines: one object per line, plain or gzipped. Blank lines are ignored.

Line offsets are found once and cached: [number of blank lines, their line numbers, first byte of each other line].
"""

import gzip
import mmap
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxhydra.data.files import partial_path
from maxhydra.data.formats.file_cache import FileCache, Unreadable, map_file, version
from maxhydra.data.formats.payload import decode_json
from maxhydra.data.records import BadRecord, Record, Records

# Bytes that are searched for line ends at a time.
BLOCK = 2**24
NEWLINE = ord("\n")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_file(path: Path, file_cache: FileCache) -> Records:
    try:
        plain = _decompress(path, file_cache.cache_dir) if path.name.endswith(".gz") else path
    except (OSError, EOFError, zlib.error) as error:
        return Unreadable(path, f"cannot be decompressed: {error}")
    if not plain.stat().st_size:
        return JsonLines(path, plain, file_cache, np.zeros(1, np.int64))
    return JsonLines(path, plain, file_cache, file_cache.cached_index(plain, "lines", lambda: find_lines(plain)))


def _decompress(path: Path, cache: Path) -> Path:
    """Decompress a .gz file into the cache, once per version of the file."""
    target = cache / "unpacked" / version(path).removesuffix(".gz")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(target)
        try:
            with gzip.open(path) as packed, partial.open("wb") as plain:
                shutil.copyfileobj(packed, plain, BLOCK)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def find_lines(path: Path) -> np.ndarray:
    """Number of blank lines, their line numbers from 0, and the first byte of each other line."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        octets = np.frombuffer(view, np.uint8)
        ends = [np.flatnonzero(octets[at : at + BLOCK] == NEWLINE) + at for at in range(0, len(octets), BLOCK)]
        starts = np.concatenate([[0], *(end + 1 for end in ends)])
        if starts[-1] == len(octets):
            starts = starts[:-1]
        stops = np.append(starts[1:], len(octets))
        # Blank lines start with whitespace, and few others do.
        candidates = np.flatnonzero(np.isin(octets[starts], np.frombuffer(b" \t\r\n", np.uint8)))
        blank = [line for line in candidates.tolist() if not view[starts[line] : stops[line]].strip()]
        del octets
    return np.concatenate([[len(blank)], np.array(blank, np.int64), np.delete(starts, blank)]).astype(np.int64)


class JsonLines:
    """Records of one JSON Lines file."""

    groups = None

    def __init__(self, path: Path, plain: Path, file_cache: FileCache, lines: np.ndarray):
        """`plain` is the file to read, `path` the one to name in messages (.gz files are decompressed)."""
        self._path, self._plain, self._file_cache = path, plain, file_cache
        blank = lines[1 : 1 + int(lines[0])]
        self._blank_after = blank - np.arange(len(blank))
        self._starts = lines[1 + int(lines[0]) :]

    def __len__(self) -> int:
        return len(self._starts)

    def location(self, index: int) -> str:
        """Path and line number as an editor counts it, including blank lines."""
        blank_before = int(np.searchsorted(self._blank_after, index, "right"))
        return f"{self._path}, line {index + blank_before + 1}"

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        view = self._file_cache.handles.get(self._plain, lambda: map_file(self._plain))
        requested = np.asarray(indices, np.int64)
        starts = self._starts[requested].tolist()
        # Blank lines after a record are trailing whitespace, which JSON allows.
        following = np.minimum(requested + 1, len(self) - 1)
        stops = np.where(requested + 1 < len(self), self._starts[following], len(view)).tolist()
        return [
            self._record(index, view[start:stop].rstrip())
            for index, start, stop in zip(indices, starts, stops, strict=True)
        ]

    def _record(self, index: int, line: bytes) -> Record | BadRecord:
        try:
            return decode_json(line.removeprefix(BYTE_ORDER_MARK) if index == 0 else line)
        except ValueError as error:
            return BadRecord(self.location(index), str(error))
