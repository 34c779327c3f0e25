"""TFRecord: length u64, checksum of the length, payload, checksum of the payload; one record after another.

The places of the records are found once, and kept: [where reading stopped, then the first byte of each payload].
"""

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxhydra.data.formats.crc32c import masked_crc32c
from maxhydra.data.formats.file_cache import FileCache
from maxhydra.data.records import BadRecord, Record, Records

HEADER, FOOTER = 12, 4

# Lengths whose checksums are computed at once.
TOGETHER = 2**16


def open_file(path: Path, file_cache: FileCache) -> Records:
    return TfRecordFile(path, file_cache, file_cache.cached_index(path, "records", lambda: find_records(path)))


def find_records(path: Path) -> np.ndarray:
    """Where a file can no longer be followed (its size, if it is whole), and the first byte of each payload."""
    with _mapped(path) as view:
        starts, at, end = [], 0, len(view)
        while at + HEADER <= end:
            (size,) = struct.unpack_from("<Q", view, at)
            if at + HEADER + size + FOOTER > end:
                break
            starts.append(at + HEADER)
            at += HEADER + size + FOOTER
        headers = [view[start - HEADER : start] for start in starts]
    for first in range(0, len(headers), TOGETHER):
        some = headers[first : first + TOGETHER]
        wrong = np.flatnonzero(
            masked_crc32c([header[:8] for header in some]) != _stored([header[8:] for header in some])
        )
        if len(wrong):
            # Nothing tells where the next record begins, so what follows was not found but guessed.
            starts = starts[: first + int(wrong[0]) + 1]
            at = starts.pop() - HEADER
            break
    return np.array([at, *starts], np.int64)


def _stored(checksums: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(checksums), "<u4")


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class TfRecordFile:
    groups = None

    def __init__(self, path: Path, file_cache: FileCache, places: np.ndarray):
        self._path, self._file_cache = path, file_cache
        self._stop, self._starts = int(places[0]), places[1:]
        # What cannot be followed counts as one more record, a bad one.
        self._is_whole = self._stop == path.stat().st_size

    def __len__(self) -> int:
        return len(self._starts) + (not self._is_whole)

    def location(self, index: int) -> str:
        return f"{self._path}, record {index}"

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        view = self._file_cache.handles.get(self._path, lambda: _mapped(self._path))
        payloads = {index: self._payload(view, index) for index in indices if index < len(self._starts)}
        computed = masked_crc32c([payload for payload, _ in payloads.values()])
        right = computed == _stored([checksum for _, checksum in payloads.values()])
        sound = dict(zip(payloads, right.tolist(), strict=True))
        return [
            self._record(index, payloads[index][0], sound[index]) if index in sound else self._rest()
            for index in indices
        ]

    def _payload(self, view: mmap.mmap, index: int) -> tuple[bytes, bytes]:
        start = int(self._starts[index])
        (size,) = struct.unpack_from("<Q", view, start - HEADER)
        return view[start : start + size], view[start + size : start + size + FOOTER]

    def _record(self, index: int, payload: bytes, is_sound: bool) -> Record | BadRecord:
        if not is_sound:
            return BadRecord(self.location(index), "its checksum is wrong: the file is damaged here")
        try:
            return self._file_cache.decode(payload)
        except ValueError as error:
            return BadRecord(self.location(index), str(error))

    def _rest(self) -> BadRecord:
        reason = f"cut short or damaged: what follows byte {self._stop} cannot be read"
        return BadRecord(self.location(len(self._starts)), reason)
