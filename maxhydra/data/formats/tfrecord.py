"""TFRecord: length u64, checksum of the length, payload, checksum of the payload; one record after another.

Record offsets are found once and cached: [where parsing stopped, first byte of each payload].
"""

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxhydra.data.formats.crc32c import masked_crc32c
from maxhydra.data.formats.file_cache import FileCache, map_file
from maxhydra.data.records import BadRecord, Record, Records

HEADER, FOOTER = 12, 4

# Headers whose checksums are computed at once.
HEADERS_AT_ONCE = 2**16


def open_file(path: Path, file_cache: FileCache) -> Records:
    return TfRecordFile(path, file_cache, file_cache.cached_index(path, "records", lambda: find_records(path)))


def find_records(path: Path) -> np.ndarray:
    """End of the readable part of a file (its size, if it is intact), and the first byte of each payload."""
    with map_file(path) as view:
        starts, at, end = [], 0, len(view)
        while at + HEADER <= end:
            (size,) = struct.unpack_from("<Q", view, at)
            if at + HEADER + size + FOOTER > end:
                break
            starts.append(at + HEADER)
            at += HEADER + size + FOOTER
        headers = [view[start - HEADER : start] for start in starts]
    for first in range(0, len(headers), HEADERS_AT_ONCE):
        some = headers[first : first + HEADERS_AT_ONCE]
        wrong = np.flatnonzero(
            masked_crc32c([header[:8] for header in some]) != _stored([header[8:] for header in some])
        )
        if len(wrong):
            # After a bad length the start of the next record is unknown, so later offsets are meaningless.
            starts = starts[: first + int(wrong[0]) + 1]
            at = starts.pop() - HEADER
            break
    return np.array([at, *starts], np.int64)


def _stored(checksums: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(checksums), "<u4")


class TfRecordFile:
    """Records of one TFRecord file."""

    groups = None

    def __init__(self, path: Path, file_cache: FileCache, offsets: np.ndarray):
        self._path, self._file_cache = path, file_cache
        self._stop, self._starts = int(offsets[0]), offsets[1:]
        # The unreadable rest counts as one bad record.
        self._is_intact = self._stop == path.stat().st_size

    def __len__(self) -> int:
        return len(self._starts) + (not self._is_intact)

    def location(self, index: int) -> str:
        return f"{self._path}, record {index}"

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        view = self._file_cache.handles.get(self._path, lambda: map_file(self._path))
        payloads = {index: self._payload(view, index) for index in indices if index < len(self._starts)}
        computed = masked_crc32c([payload for payload, _ in payloads.values()])
        right = computed == _stored([checksum for _, checksum in payloads.values()])
        is_intact = dict(zip(payloads, right.tolist(), strict=True))
        return [
            self._record(index, payloads[index][0], is_intact[index]) if index in is_intact else self._unreadable_rest()
            for index in indices
        ]

    def _payload(self, view: mmap.mmap, index: int) -> tuple[bytes, bytes]:
        start = int(self._starts[index])
        (size,) = struct.unpack_from("<Q", view, start - HEADER)
        return view[start : start + size], view[start + size : start + size + FOOTER]

    def _record(self, index: int, payload: bytes, is_intact: bool) -> Record | BadRecord:
        if not is_intact:
            return BadRecord(self.location(index), "checksum mismatch: the file is damaged here")
        try:
            return self._file_cache.decode(payload)
        except ValueError as error:
            return BadRecord(self.location(index), str(error))

    def _unreadable_rest(self) -> BadRecord:
        reason = f"truncated or damaged: nothing after byte {self._stop} can be read"
        return BadRecord(self.location(len(self._starts)), reason)
