"""Rows: sequences of a fixed length, which are all that a batch is made of."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.data.document import Document
from maxhydra.data.packing import PackingPlan

# tokens, targets, positions int32 and weights float32 (0 where no loss), each [seq_len]. A row of several documents has
# segments int32 too (0 is padding). Without, a row is one sequence with padding at its end only, which no token before
# it can see, so attention needs no mask. Columns of dtype object stay on the host.
Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """What every row looks like."""

    seq_len: int
    vocab_size: int
    """Of the model; a source must stay within it."""
    seed: int


class Rows(Protocol):
    """Sequences by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


def make_row(tokens: np.ndarray, seq_len: int) -> Row:
    """Up to seq_len + 1 tokens as inputs and the tokens that follow them, padded to seq_len."""
    count = len(tokens) - 1
    row = {name: np.zeros(seq_len, np.int32) for name in ("tokens", "targets")}
    row["tokens"][:count] = tokens[:-1]
    row["targets"][:count] = tokens[1:]
    row["positions"] = np.arange(seq_len, dtype=np.int32)
    row["weights"] = (row["positions"] < count).astype(np.float32)
    return row


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The rows of a plan, as arrays [rows, seq_len]."""

    arrays: dict[str, np.ndarray]
    order: np.ndarray
    """Row of the arrays that stands at each place: another order moves no tokens."""
    filled: np.ndarray
    """How many places of each row of the arrays hold a document."""
    cut: int = 0
    """Documents of which a part, or all, was left out for being too long."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Row:
        at = self.order[index]
        return {name: array[at, ...] for name, array in self.arrays.items()}

    def filled_of(self, index: int) -> int:
        """Places of a row that hold a document."""
        return int(self.filled[self.order[index]])

    def taken(self, order: np.ndarray) -> "PackedRows":
        """The same rows in another order."""
        return dataclasses.replace(self, order=self.order[order])


def stack_rows(rows: Sequence[Row]) -> PackedRows:
    """Rows that were made one by one, whose positions are 0 in padding, or which have a `length` instead."""
    if not rows:
        return PackedRows({}, np.arange(0), np.arange(0))
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    filled = np.zeros(len(rows), np.int64) + arrays.get("length", 0)
    for name, array in arrays.items():
        if name.endswith("positions"):
            filled += 1 + np.count_nonzero(array, axis=1)
    return PackedRows(arrays, np.arange(len(rows)), filled)


def pack_rows(documents: Sequence[Document], plan: PackingPlan, seq_len: int, *, with_segments: bool) -> PackedRows:
    """Lay the pieces of a plan into rows.

    The pieces of a row follow each other, so a column is one concatenation of slices and of what pads each row: four
    times as fast as one index per token.
    """
    if not plan.rows:
        return PackedRows({}, np.arange(0), np.arange(0), plan.cut)
    pieces = list(zip(plan.document.tolist(), plan.start.tolist(), plan.count.tolist(), strict=True))
    filled = np.bincount(plan.row, plan.count, plan.rows).astype(np.int64)
    ends_row = np.append(np.diff(plan.row) > 0, True)
    padding = np.where(ends_row, seq_len - filled[plan.row], 0).tolist()

    def lay(parts: Iterable[np.ndarray], dtype: np.dtype | type, shape: tuple[int, ...] = ()) -> np.ndarray:
        nothing = np.zeros((seq_len, *shape), dtype)
        laid: list[np.ndarray] = []
        for part, pad in zip(parts, padding, strict=True):
            laid.append(part)
            if pad:
                laid.append(nothing[:pad])
        array = np.empty((plan.rows * seq_len, *shape), dtype)
        np.concatenate(laid, out=array)
        return array.reshape(plan.rows, seq_len, *shape)

    tokens = [document.tokens for document in documents]
    place = np.arange(seq_len, dtype=np.int32)
    arrays = {
        "tokens": lay((tokens[i][start : start + count] for i, start, count in pieces), np.int32),
        "targets": lay((tokens[i][start + 1 : start + 1 + count] for i, start, count in pieces), np.int32),
        "positions": lay((place[:count] for _, _, count in pieces), np.int32),
    }
    weights = [document.weights for document in documents]
    if all(weight is None for weight in weights):
        arrays["weights"] = (place < filled[:, None]).astype(np.float32)
    else:
        one = np.ones(seq_len, np.float32)
        parts = (
            one[:count] if (weight := weights[i]) is None else weight[start + 1 : start + 1 + count]
            for i, start, count in pieces
        )
        arrays["weights"] = lay(parts, np.float32)
    if with_segments:
        segment = np.stack([plan.segment.astype(np.int32), np.zeros(len(pieces), np.int32)], 1)
        arrays["segments"] = np.repeat(segment.ravel(), np.stack([plan.count, padding], 1).ravel())
        arrays["segments"] = arrays["segments"].reshape(plan.rows, seq_len)
    for name, first in documents[0].columns.items():
        columns = [document.columns[name] for document in documents]
        if any(column.shape[1:] != first.shape[1:] for column in columns):
            sizes = sorted({column.shape[1:] for column in columns})
            raise ConfigError(Problem("data", f"records differ in the size of {name}: {', '.join(map(str, sizes))}"))
        parts = (columns[i][start : start + count] for i, start, count in pieces)
        arrays[name] = lay(parts, first.dtype, first.shape[1:])
    return PackedRows(arrays, np.arange(plan.rows), filled, plan.cut)


@dataclasses.dataclass(frozen=True)
class ContiguousRows:
    """A stream of tokens cut so that each token after the first is the target of exactly one row.

    Row k reads tokens k * seq_len to (k + 1) * seq_len - 1 and predicts the one after each. What does not fill a row at
    the end is dropped, or kept as a padded row.
    """

    tokens: np.ndarray
    seq_len: int
    keep_partial: bool

    def __len__(self) -> int:
        targets = max(len(self.tokens) - 1, 0)
        return -(-targets // self.seq_len) if self.keep_partial else targets // self.seq_len

    def __getitem__(self, index: int) -> Row:
        start = index * self.seq_len
        return make_row(self.tokens[start : start + self.seq_len + 1], self.seq_len)
