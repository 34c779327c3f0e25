"""ArrayRecord: records by index, in chunks that are compressed separately.

In a file written with group_size:1 each record is read alone, in 7 microseconds. Other files are read a chunk at a
time: lots of about LOT records are read together, at 1 to 2 microseconds per record, and shuffled by the lot.
"""

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from maxhydra.data.formats import split_into_runs
from maxhydra.data.formats.file_cache import FileCache, Group, Unreadable
from maxhydra.data.records import BadRecord, Record, Records

LOT = 1024

# For random access: no readahead, no extra threads, and little more than the record itself is read.
OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
BUFFER = 4096


def open_file(path: Path, file_cache: FileCache) -> Records:
    reader = _open_reader(path)
    if not reader.ok():
        return Unreadable(path, "not a complete ArrayRecord file: the index at its end cannot be read")
    match = re.search(r"group_size:(\d+)", reader.writer_options_string() or "")
    size = int(match[1]) if match else 1
    count = reader.num_records()
    reader.close()
    return ArrayRecordFile(path, file_cache, count=count, lot=None if size == 1 else -(-LOT // size) * size)


def _open_reader(path: Path) -> Any:
    return ArrayRecordReader(str(path), options=OPTIONS, file_reader_buffer_size=BUFFER)


class ArrayRecordFile:
    """Records of one ArrayRecord file."""

    def __init__(self, path: Path, file_cache: FileCache, *, count: int, lot: int | None):
        """`lot` is the number of records that are read together; None: each is read alone."""
        self._path, self._file_cache, self._count, self._lot = path, file_cache, count, lot

    def __len__(self) -> int:
        return self._count

    @property
    def groups(self) -> list[int] | None:
        return None if self._lot is None else split_into_runs(self._count, self._lot)

    def location(self, index: int) -> str:
        return f"{self._path}, record {index}"

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        payloads = self._read_singles(indices) if self._lot is None else self._read_lots(indices, self._lot)
        return [
            self._decode(index, payload) if isinstance(payload, bytes) else payload
            for index, payload in zip(indices, payloads, strict=True)
        ]

    def _decode(self, index: int, payload: bytes) -> Record | BadRecord:
        try:
            return self._file_cache.decode(payload)
        except ValueError as error:
            return BadRecord(self.location(index), str(error))

    def _read_singles(self, indices: Sequence[int]) -> list[bytes | BadRecord]:
        """Seek and read: three times as fast as the reader's own batches, but only one thread at a time."""
        reader, lock = self._file_cache.handles.get(self._path, lambda: (_open_reader(self._path), threading.Lock()))
        payloads: list[bytes | BadRecord] = []
        with lock:
            try:
                for index in indices:
                    reader.seek(index)
                    payloads.append(reader.read())
                return payloads
            except (RuntimeError, IndexError):
                # After a damaged chunk, a reader cannot read any more.
                self._file_cache.handles.forget(self._path)
        return payloads + self._read_separately(indices[len(payloads) :])

    def _read_separately(self, indices: Sequence[int]) -> list[bytes | BadRecord]:
        """Read each record separately, since a damaged chunk fails the whole read."""
        reader = _open_reader(self._path)
        payloads: list[bytes | BadRecord] = []
        for index in indices:
            try:
                payloads += reader.read([index])
            except (RuntimeError, IndexError) as error:
                payloads.append(BadRecord(self.location(index), str(error).split(", chunk at")[0]))
        return payloads

    def _read_lots(self, indices: Sequence[int], lot: int) -> list[bytes | BadRecord]:
        lots = {number: self._read_lot(number, lot) for number in {index // lot for index in indices}}
        return [lots[index // lot][index % lot] for index in indices]

    def _read_lot(self, number: int, lot: int) -> list[bytes | BadRecord]:
        def read() -> Group:
            start, stop = number * lot, min((number + 1) * lot, self._count)
            try:
                payloads: list[bytes | BadRecord] = _open_reader(self._path).read(start, stop)
            except (RuntimeError, IndexError):
                payloads = self._read_separately(range(start, stop))
            return Group(payloads, sum(len(payload) for payload in payloads if isinstance(payload, bytes)))

        payloads: list[bytes | BadRecord] = self._file_cache.groups.get((self._path, number), read).value
        return payloads
