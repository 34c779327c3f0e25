"""Streams: rows without end from one share of a source, with a small state to go on from."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.data.encode import Encoded
from maxhydra.data.read_ahead import Chunk, Chunks
from maxhydra.data.records import BadRecord, Cursor
from maxhydra.data.rows import PackedRows, Row, Rows
from maxhydra.data.shuffle import ShuffleOrder, share_of

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ReadStats:
    """What a stream has given out in this session: sequences, their places, those that hold a document."""

    rows: int = 0
    places: int = 0
    filled: int = 0
    skipped: int = 0
    """Records left out."""
    epoch: float = 0.0
    """Of the last row given out."""
    dropped: int = 0
    """Documents that data.packing.overlong cut short or left out."""

    def __add__(self, other: "ReadStats") -> "ReadStats":
        return ReadStats(
            self.rows + other.rows,
            self.places + other.places,
            self.filled + other.filled,
            self.skipped + other.skipped,
            max(self.epoch, other.epoch),
            self.dropped + other.dropped,
        )


class Stream(Protocol):
    """Rows, one after another. A stream of a single epoch ends in StopIteration."""

    @property
    def counts(self) -> ReadStats: ...

    def take(self) -> Row: ...

    def skip(self) -> None:
        """Leave a row to another process."""
        ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...

    def close(self) -> None: ...


class RowStream:
    """The share of a source whose rows are there by index: nothing is read to skip one."""

    def __init__(self, rows: Rows, order: ShuffleOrder, *, share: int, shares: int, epochs: int | None):
        self._rows, self._order = rows, order
        self._first, last = share_of(order.length, share, shares)
        self._count = last - self._first
        self._epochs = epochs
        self._given = 0
        self.counts = ReadStats()

    def take(self) -> Row:
        epoch, at = divmod(self._given, self._count)
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        (index,) = self._order.indices(epoch, self._first + at, self._first + at + 1)
        row = self._rows[int(index)]
        self._given += 1
        size = len(row["tokens"])
        filled = int(np.count_nonzero(row["weights"]))
        self.counts += ReadStats(1, size, filled, 0, self._given / self._count)
        return row

    def skip(self) -> None:
        self._given += 1

    def state(self) -> State:
        return {"given": self._given}

    def restore(self, state: State) -> None:
        self._given = int(state["given"])

    def close(self) -> None:
        pass


class PackedStream:
    """The share of a source of records: chunks are read until they fill a window, which is packed as one.

    A window is a function of where it begins, so the state is that cursor and how many of its rows were given out.
    """

    def __init__(
        self,
        chunks: Chunks,
        encode: Callable[[Iterator[Chunk]], Iterator[tuple[Chunk, Encoded]]],
        pack: Callable[[list[Any], tuple[int, ...]], PackedRows],
        *,
        window: int,
        on_bad_record: Callable[[BadRecord], None],
        epochs: int | None,
    ):
        """`encode` reads and tokenizes chunks; `pack` makes rows of examples, in an order drawn from a key."""
        self._chunks, self._encode, self._pack = chunks, encode, pack
        self._window, self._on_bad_record, self._epochs = window, on_bad_record, epochs
        self.counts = ReadStats()
        self._begin(None, 0)

    def _begin(self, cursor: Cursor | None, given: int) -> None:
        self._encoded = self._encode(self._chunks.iter_from(cursor, self._epochs))
        self._cursor = self._after = cursor
        self._epoch = 0
        self._rows: PackedRows | None = None
        self._given = given

    def take(self) -> Row:
        rows = self._ensure()
        row = rows[self._given]
        places = sum(len(column) for name, column in row.items() if name.endswith("tokens"))
        self.counts += ReadStats(1, places, rows.filled_of(self._given), 0, self._epoch)
        self._given += 1
        return row

    def skip(self) -> None:
        self._ensure()
        self._given += 1

    def _ensure(self) -> PackedRows:
        """A window with a row that was not given out yet."""
        without = 0
        while self._rows is None or self._given >= len(self._rows):
            if self._rows is not None:
                self._cursor, self._given = self._after, 0
            examples, first, ends_epoch = self._read()
            self._rows = self._pack(examples, (first.epoch, *_key(first.cursor)))
            self.counts += ReadStats(dropped=self._rows.cut)
            without = without + ends_epoch if not len(self._rows) else 0
            if without > 1:
                raise ConfigError(Problem("data", "no record of a whole epoch could be used"))
        return self._rows

    def _read(self) -> tuple[list[Any], Chunk, bool]:
        """The examples of the next window, its first chunk, and whether the epoch ends with it."""
        examples: list[Any] = []
        first, places = None, 0
        for chunk, encoded in self._encoded:
            first = first or chunk
            for bad_record in encoded.bad_records:
                self.counts += ReadStats(skipped=1)
                self._on_bad_record(bad_record)
            examples += encoded.examples
            places += encoded.places
            self._cursor, self._after = first.cursor, chunk.after
            if places >= self._window or chunk.ends_epoch:
                self._epoch = first.epoch
                return examples, first, chunk.ends_epoch
        raise StopIteration

    def state(self) -> State:
        if self._rows is not None and self._given >= len(self._rows):
            return {"cursor": self._after, "row": 0}
        return {"cursor": self._cursor, "row": self._given}

    def restore(self, state: State) -> None:
        self.close()
        self._begin(state["cursor"], int(state["row"]))

    def close(self) -> None:
        self._encoded.close()  # type: ignore[attr-defined]


def _key(cursor: Cursor) -> tuple[int, ...]:
    """Numbers that tell one window of an epoch from another, where the cursor has any."""
    return (cursor["at"],) if isinstance(cursor["at"], int) else ()
