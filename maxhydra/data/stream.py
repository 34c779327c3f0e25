"""Streams: endless sequences of rows from one share of a source, with a small state to resume from."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.data.read_ahead import Chunk, Chunks, Encoded
from maxhydra.data.records import BadRecord, Cursor
from maxhydra.data.rows import PackedRows, Row, Rows
from maxhydra.data.shuffle import ShuffleOrder, share_of

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ReadStats:
    """Counts of the rows that a stream has returned in this session."""

    rows: int = 0
    capacity: int = 0
    """Positions in these rows, padding included."""
    filled: int = 0
    """Positions that hold a document."""
    skipped: int = 0
    """Bad records that were skipped."""
    epoch: float = 0.0
    """Epoch of the last row."""
    dropped: int = 0
    """Documents that data.packing.overlong truncated or dropped."""

    def __add__(self, other: "ReadStats") -> "ReadStats":
        return ReadStats(
            self.rows + other.rows,
            self.capacity + other.capacity,
            self.filled + other.filled,
            self.skipped + other.skipped,
            max(self.epoch, other.epoch),
            self.dropped + other.dropped,
        )


class Stream(Protocol):
    """An iterator over the rows of one share of a source; StopIteration ends a stream of finite epochs."""

    @property
    def stats(self) -> ReadStats: ...

    def take(self) -> Row:
        """Return the next row."""
        ...

    def skip(self) -> None:
        """Skip the next row, which another process takes."""
        ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...

    def close(self) -> None: ...


class RowStream:
    """Stream over rows that are available by index; skipping a row reads nothing."""

    def __init__(self, rows: Rows, order: ShuffleOrder, *, share: int, shares: int, epochs: int | None):
        self._rows, self._order = rows, order
        self._first, last = share_of(order.length, share, shares)
        self._count = last - self._first
        self._epochs = epochs
        self._position = 0
        self.stats = ReadStats()

    def take(self) -> Row:
        epoch, at = divmod(self._position, self._count)
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        (index,) = self._order.indices(epoch, self._first + at, self._first + at + 1)
        row = self._rows[int(index)]
        self._position += 1
        filled = int(np.count_nonzero(row["weights"]))
        self.stats += ReadStats(1, len(row["tokens"]), filled, 0, self._position / self._count)
        return row

    def skip(self) -> None:
        self._position += 1

    def state(self) -> State:
        return {"given": self._position}

    def restore(self, state: State) -> None:
        self._position = int(state["given"])

    def close(self) -> None:
        pass


class PackedStream:
    """Stream over records: chunks are read until they fill a packing window, which is packed as a whole.

    A window is a function of the cursor where it starts, so the state is that cursor and the next row of the window.
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
        """`encode` reads and tokenizes chunks; `pack` turns examples into rows, shuffled with a key.

        `window` is the size of a packing window in tokens.
        """
        self._chunks, self._encode, self._pack = chunks, encode, pack
        self._window, self._on_bad_record, self._epochs = window, on_bad_record, epochs
        self.stats = ReadStats()
        self._seek(None, 0)

    def _seek(self, cursor: Cursor | None, next_row: int) -> None:
        self._encoded = self._encode(self._chunks.iter_from(cursor, self._epochs))
        self._cursor = self._after = cursor
        self._epoch = 0
        self._rows: PackedRows | None = None
        self._next_row = next_row

    def take(self) -> Row:
        rows = self._fill_window()
        row = rows[self._next_row]
        capacity = sum(len(column) for name, column in row.items() if name.endswith("tokens"))
        self.stats += ReadStats(1, capacity, rows.num_filled(self._next_row), 0, self._epoch)
        self._next_row += 1
        return row

    def skip(self) -> None:
        self._fill_window()
        self._next_row += 1

    def _fill_window(self) -> PackedRows:
        """Return a window with at least one row left, reading the next one if necessary."""
        empty_epochs = 0
        while self._rows is None or self._next_row >= len(self._rows):
            if self._rows is not None:
                self._cursor, self._next_row = self._after, 0
            examples, first, ends_epoch = self._read_window()
            self._rows = self._pack(examples, (first.epoch, *_window_key(first.cursor)))
            self.stats += ReadStats(dropped=self._rows.cut)
            empty_epochs = empty_epochs + ends_epoch if not len(self._rows) else 0
            if empty_epochs > 1:
                hint = "check data.record_type and data.columns with task=inspect_data"
                raise ConfigError(Problem("data", "a whole epoch has no usable record", hint=hint))
        return self._rows

    def _read_window(self) -> tuple[list[Any], Chunk, bool]:
        """Read the examples of the next window; also return its first chunk and whether it ends the epoch."""
        examples: list[Any] = []
        first, num_tokens = None, 0
        for chunk, encoded in self._encoded:
            first = first or chunk
            for bad_record in encoded.bad_records:
                self.stats += ReadStats(skipped=1)
                self._on_bad_record(bad_record)
            examples += encoded.examples
            num_tokens += encoded.num_tokens
            self._cursor, self._after = first.cursor, chunk.after
            if num_tokens >= self._window or chunk.ends_epoch:
                self._epoch = first.epoch
                return examples, first, chunk.ends_epoch
        raise StopIteration

    def state(self) -> State:
        if self._rows is not None and self._next_row >= len(self._rows):
            return {"cursor": self._after, "row": 0}
        return {"cursor": self._cursor, "row": self._next_row}

    def restore(self, state: State) -> None:
        self.close()
        self._seek(state["cursor"], int(state["row"]))

    def close(self) -> None:
        self._encoded.close()  # type: ignore[attr-defined]


def _window_key(cursor: Cursor) -> tuple[int, ...]:
    """PRNG key that distinguishes the windows of an epoch, if the cursor is a number."""
    return (cursor["at"],) if isinstance(cursor["at"], int) else ()


class MixtureStream:
    """Stream over several sources: each row comes from the source furthest behind its share (ties: the first).

    The order is deterministic and depends only on the shares.
    """

    def __init__(self, streams: Mapping[str, Stream], shares: Mapping[str, float]):
        self._streams, self._shares = dict(streams), shares
        self._rows_taken = dict.fromkeys(streams, 0)

    @property
    def stats(self) -> ReadStats:
        return sum((stream.stats for stream in self._streams.values()), ReadStats())

    def _next_stream(self) -> Stream:
        total = sum(self._rows_taken.values()) + 1
        name = max(self._shares, key=lambda name: self._shares[name] * total - self._rows_taken[name])
        self._rows_taken[name] += 1
        return self._streams[name]

    def take(self) -> Row:
        return self._next_stream().take()

    def skip(self) -> None:
        self._next_stream().skip()

    def state(self) -> State:
        return {
            "given": dict(self._rows_taken),
            "shares": dict(self._shares),
            "sources": {name: stream.state() for name, stream in self._streams.items()},
        }

    def restore(self, state: State) -> None:
        """Resume every source; a source that is new in the mixture starts at its beginning.

        If the shares have changed, row counts restart at 0: otherwise the mixture would first make up for rows that it
        returned under the old shares.
        """
        is_same = state.get("shares", self._shares) == self._shares
        for name, stream in self._streams.items():
            self._rows_taken[name] = int(state["given"][name]) if is_same else 0
            if is_same or name in state["sources"]:
                stream.restore(state["sources"][name])

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def mixture_shares(data: Data, sizes: Mapping[str, int | None]) -> dict[str, float]:
    """Share of rows per source: its weight, or its number of records to the power 1 / temperature; normalized."""
    if data.weights:
        raw = {name: float(data.weights[name]) for name in data.sources}
    else:
        for name, size in sizes.items():
            if size is None:
                reason = f"must be set, because data.sources.{name} is a stream of unknown length"
                hint = "data.temperature needs the number of records of every source"
                raise ConfigError(Problem("data.weights", reason, accepted="a weight for each source", hint=hint))
        raw = {name: float(size or 0) ** (1 / data.temperature) for name, size in sizes.items()}
    total = sum(raw.values())
    return {name: value / total for name, value in raw.items()}
