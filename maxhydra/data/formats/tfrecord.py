"""TFRecord: length u64, checksum of the length, payload, checksum of the payload; one record after another.

Record offsets are found once and cached: [where parsing stopped, first byte of each payload].

The checksum is a masked CRC-32C, computed for many payloads at once in NumPy. A CRC is linear over XOR, so payloads are
split into blocks of WIDTH bytes that are processed in parallel, byte by byte; then the blocks of each payload are
combined: advancing a register by WIDTH zero bytes takes four table lookups. Zeros before a payload change nothing while
the register is 0, and an initial value of all ones is the same as inverting the first four bytes.
"""

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxhydra.data.formats.file_cache import FileCache, map_file
from maxhydra.data.records import BadRecord, Record, Records

POLYNOMIAL = 0x82F63B78
MASK = 0xA282EAD8
WIDTH = 64


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    return table


BYTE = _byte_table()


def _advance_zeros(register: np.ndarray, count: int) -> np.ndarray:
    """Advance registers by `count` zero bytes."""
    for _ in range(count):
        register = BYTE[register & 0xFF] ^ (register >> np.uint32(8))
    return register


# Contribution of each byte of a register after WIDTH zero bytes.
BLOCK = [_advance_zeros(np.arange(256, dtype=np.uint32) << np.uint32(8 * byte), WIDTH) for byte in range(4)]


def masked_crc32c(payloads: Sequence[bytes]) -> np.ndarray:
    """Masked checksum of each payload: uint32 [n]."""
    plain = crc32c(payloads)
    return ((plain >> np.uint32(15)) | (plain << np.uint32(17))) + np.uint32(MASK)


def crc32c(payloads: Sequence[bytes]) -> np.ndarray:
    """Checksum of each payload: uint32 [n]."""
    if not payloads:
        return np.empty(0, np.uint32)
    # Payloads of less than four bytes cannot hold the inverted start, and are computed separately.
    sizes = np.array([len(payload) for payload in payloads])
    blocks = np.maximum(-(-sizes // WIDTH), 1)
    last = np.cumsum(blocks)
    octets = np.zeros(int(last[-1]) * WIDTH, np.uint8)
    for payload, stop in zip(payloads, (last * WIDTH).tolist(), strict=True):
        octets[stop - len(payload) : stop] = np.frombuffer(payload, np.uint8)
    starts = last * WIDTH - sizes
    long = np.flatnonzero(sizes >= 4)
    octets[(starts[long, None] + np.arange(4)).ravel()] ^= 0xFF
    register = _combine_blocks(_block_crcs(octets.reshape(-1, WIDTH)), blocks, last) ^ np.uint32(0xFFFFFFFF)
    for index in np.flatnonzero(sizes < 4).tolist():
        register[index] = _scalar_crc32c(payloads[index])
    return register


def _block_crcs(octets: np.ndarray) -> np.ndarray:
    register = np.zeros(len(octets), np.uint32)
    for column in np.ascontiguousarray(octets.T):
        register = BYTE[(register ^ column) & 0xFF] ^ (register >> np.uint32(8))
    return register


def _combine_blocks(block_crcs: np.ndarray, blocks: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Combine the blocks of each payload in order, for all payloads in parallel."""
    register = np.zeros(len(blocks), np.uint32)
    for step in range(int(blocks.max())):
        active = np.flatnonzero(blocks > step)
        before = register[active]
        advanced = BLOCK[0][before & 0xFF]
        for byte in (1, 2, 3):
            advanced = advanced ^ BLOCK[byte][(before >> np.uint32(8 * byte)) & 0xFF]
        register[active] = advanced ^ block_crcs[last[active] - blocks[active] + step]
    return register


def _scalar_crc32c(payload: bytes) -> np.uint32:
    register = 0xFFFFFFFF
    for octet in payload:
        register = int(BYTE[(register ^ octet) & 0xFF]) ^ (register >> 8)
    return np.uint32(register ^ 0xFFFFFFFF)


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
