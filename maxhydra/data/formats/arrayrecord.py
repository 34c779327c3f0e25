"""ArrayRecord: records by index, in chunks that are compressed one by one.

A file written with group_size:1 gives each record alone, at 7 microseconds. Others give a chunk at a time; then lots of
about LOT records are read as one, at 1 to 2 microseconds a record, and shuffled by the lot.
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

# For random access: nothing is read ahead, in no other thread, and little more than the record itself.
OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
BUFFER = 4096


def open_file(path: Path, file_cache: FileCache) -> Records:
    reader = _reader(path)
    if not reader.ok():
        return Unreadable(path, "not a whole ArrayRecord file: its index, which stands at the end, cannot be read")
    found = re.search(r"group_size:(\d+)", reader.writer_options_string() or "")
    size = int(found[1]) if found else 1
    count = reader.num_records()
    reader.close()
    return ArrayRecordFile(path, file_cache, count=count, lot=None if size == 1 else -(-LOT // size) * size)


def _reader(path: Path) -> Any:
    return ArrayRecordReader(str(path), options=OPTIONS, file_reader_buffer_size=BUFFER)


class ArrayRecordFile:
    def __init__(self, path: Path, file_cache: FileCache, *, count: int, lot: int | None):
        """`lot` is how many records are read as one, None where each is read alone."""
        self._path, self._file_cache, self._count, self._lot = path, file_cache, count, lot

    def __len__(self) -> int:
        return self._count

    @property
    def groups(self) -> list[int] | None:
        return None if self._lot is None else split_into_runs(self._count, self._lot)

    def location(self, index: int) -> str:
        return f"{self._path}, record {index}"

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        payloads = self._singles(indices) if self._lot is None else self._from_lots(indices, self._lot)
        return [
            self._decoded(index, payload) if isinstance(payload, bytes) else payload
            for index, payload in zip(indices, payloads, strict=True)
        ]

    def _decoded(self, index: int, payload: bytes) -> Record | BadRecord:
        try:
            return self._file_cache.decode(payload)
        except ValueError as error:
            return BadRecord(self.location(index), str(error))

    def _singles(self, indices: Sequence[int]) -> list[bytes | BadRecord]:
        """Seek and read: three times as fast as the reader's own batches, but for one thread at a time."""
        reader, lock = self._file_cache.handles.get(self._path, lambda: (_reader(self._path), threading.Lock()))
        payloads: list[bytes | BadRecord] = []
        with lock:
            try:
                for index in indices:
                    reader.seek(index)
                    payloads.append(reader.read())
                return payloads
            except (RuntimeError, IndexError):
                # A reader that met a damaged chunk reads nothing any more.
                self._file_cache.handles.forget(self._path)
        return payloads + self._one_by_one(indices[len(payloads) :])

    def _one_by_one(self, indices: Sequence[int]) -> list[bytes | BadRecord]:
        """Each record alone, since a damaged chunk spoils all that is read with it."""
        reader = _reader(self._path)
        payloads: list[bytes | BadRecord] = []
        for index in indices:
            try:
                payloads += reader.read([index])
            except (RuntimeError, IndexError) as error:
                payloads.append(BadRecord(self.location(index), str(error).split(", chunk at")[0]))
        return payloads

    def _from_lots(self, indices: Sequence[int], lot: int) -> list[bytes | BadRecord]:
        held = {number: self._held(number, lot) for number in {index // lot for index in indices}}
        return [held[index // lot][index % lot] for index in indices]

    def _held(self, number: int, lot: int) -> list[bytes | BadRecord]:
        def make() -> Group:
            start, stop = number * lot, min((number + 1) * lot, self._count)
            try:
                payloads: list[bytes | BadRecord] = _reader(self._path).read(start, stop)
            except (RuntimeError, IndexError):
                payloads = self._one_by_one(range(start, stop))
            return Group(payloads, sum(len(payload) for payload in payloads if isinstance(payload, bytes)))

        held: list[bytes | BadRecord] = self._file_cache.groups.get((self._path, number), make).value
        return held
