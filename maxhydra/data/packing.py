"""Which documents share a row. Pure functions of the documents' lengths, so that a window can be packed again.

Grain's packers work on one document at a time, at 5 to 8 million tokens a second on one core with documents of 600
tokens; a window of documents packed at once, in NumPy, is an order of magnitude faster and needs no state of its own.
"""

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

from maxhydra.config.schema.data import Overlong, Packing, PackingMethod


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Pieces of documents in rows, ordered by row and place. Every array has one entry per piece."""

    rows: int
    document: np.ndarray
    start: np.ndarray
    """First place of the document that the piece holds."""
    count: np.ndarray
    row: np.ndarray
    offset: np.ndarray
    """First place in the row."""
    segment: np.ndarray
    """1 for the first piece of a row, and so on."""
    cut: int = 0
    """Documents of which a part, or all, is in no row, since they are too long."""


def plan(lengths: np.ndarray, capacity: int, packing: Packing) -> PackingPlan:
    """Rows of `capacity` places for documents of some lengths."""
    method = PackingMethod.best_fit if packing.method is PackingMethod.auto else packing.method
    limit = 1 if method is PackingMethod.none else packing.max_segments or capacity
    if method is PackingMethod.concat_then_split:
        return _concat_then_split(lengths, capacity, limit)
    document, start, count = _pieces(lengths, capacity, packing.overlong)
    row = _PLACERS[method](count, capacity, limit)
    cut = 0 if packing.overlong is Overlong.split else int(np.count_nonzero(lengths > capacity))
    return dataclasses.replace(_in_rows(document, start, count, row), cut=cut)


def _pieces(lengths: np.ndarray, capacity: int, overlong: Overlong) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of at most `capacity` places: document, start, count of each. Empty documents have none."""
    if overlong is Overlong.split:
        parts = -(-lengths // capacity)
    else:
        parts = ((lengths > 0) & ((lengths <= capacity) | (overlong is Overlong.truncate))).astype(lengths.dtype)
    document = np.repeat(np.arange(len(lengths)), parts)
    start = _runs(parts) * capacity
    return document, start, np.minimum(lengths[document] - start, capacity)


def _runs(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _one_each(count: np.ndarray, capacity: int, limit: int) -> np.ndarray:
    return np.arange(len(count))


def _first_fit(count: np.ndarray, capacity: int, limit: int) -> np.ndarray:
    """In order, each into the first row with room."""
    row = np.empty(len(count), np.int64)
    # A tree over as many rows as there could be, in which a node holds the most room of any row under it.
    leaves = 1 << max(0, len(count) - 1).bit_length()
    most = [capacity] * (2 * leaves)
    held = [0] * leaves
    for piece, length in enumerate(count.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            node += most[node] < length
        target = node - leaves
        row[piece] = target
        held[target] += 1
        room = most[node] - length if held[target] < limit else 0
        while most[node] != room:
            most[node] = room
            if node == 1:
                break
            room = max(room, most[node ^ 1])
            node //= 2
    return row


def _best_fit(count: np.ndarray, capacity: int, limit: int) -> np.ndarray:
    """Longest first, each into the fullest row with room."""
    row = np.empty(len(count), np.int64)
    # Rows with room, by the room they have.
    open_space: list[int] = []
    open_rows: list[int] = []
    held: list[int] = []
    lengths = count.tolist()
    for piece in np.argsort(-count, kind="stable").tolist():
        length = lengths[piece]
        at = bisect.bisect_left(open_space, length)
        if at == len(open_space):
            target, space = len(held), capacity - length
            held.append(1)
        else:
            target, space = open_rows.pop(at), open_space.pop(at) - length
            held[target] += 1
        row[piece] = target
        if space and held[target] < limit:
            at = bisect.bisect_left(open_space, space)
            open_space.insert(at, space)
            open_rows.insert(at, target)
    return row


_PLACERS: dict[PackingMethod, Callable[[np.ndarray, int, int], np.ndarray]] = {
    PackingMethod.none: _one_each,
    PackingMethod.first_fit: _first_fit,
    PackingMethod.best_fit: _best_fit,
}


def _in_rows(document: np.ndarray, start: np.ndarray, count: np.ndarray, row: np.ndarray) -> PackingPlan:
    """Order pieces by row, documents in their own order within."""
    order = np.argsort(row, kind="stable")
    document, start, count, row = document[order], start[order], count[order], row[order]
    rows = int(row[-1]) + 1 if len(row) else 0
    held = np.bincount(row, minlength=rows)
    first = np.cumsum(held) - held
    before = np.cumsum(count) - count
    offset = before - np.repeat(before[first], held) if rows else before
    return PackingPlan(rows, document, start, count, row, offset, _runs(held) + 1)


def _concat_then_split(lengths: np.ndarray, capacity: int, limit: int) -> PackingPlan:
    """One after another; a document that crosses the end of a row goes on in the next.

    A row that has `limit` pieces ends there, so the pieces are found one by one.
    """
    document, start, count, row = [], [], [], []
    at, space, room = 0, capacity, limit
    for index, length in enumerate(lengths.tolist()):
        done = 0
        while done < length:
            if not space or not room:
                at, space, room = at + 1, capacity, limit
            taken = min(space, length - done)
            document.append(index)
            start.append(done)
            count.append(taken)
            row.append(at)
            done, space, room = done + taken, space - taken, room - 1
    return _in_rows(*(np.array(column, np.int64) for column in (document, start, count, row)))
