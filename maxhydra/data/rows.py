"""Rows: sequences of a fixed length, which are all that a batch is made of."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from maxhydra.data.document import Document
from maxhydra.data.packing import Plan

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
    """The rows of a plan, as arrays [rows, seq_len]; `filled` is how many places of each hold a document."""

    arrays: dict[str, np.ndarray]
    filled: np.ndarray

    def __len__(self) -> int:
        return len(self.filled)

    def __getitem__(self, index: int) -> Row:
        return {name: array[index] for name, array in self.arrays.items()}

    def taken(self, order: np.ndarray) -> "PackedRows":
        """The same rows in another order."""
        return PackedRows({name: array[order] for name, array in self.arrays.items()}, self.filled[order])


def stack_rows(rows: Sequence[Row]) -> PackedRows:
    """Rows that were made one by one."""
    if not rows:
        return PackedRows({}, np.empty(0, np.int64))
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    filled = np.count_nonzero(arrays["weights"], axis=1) if "weights" in arrays else np.full(len(rows), 0)
    return PackedRows(arrays, filled)


def pack_rows(documents: Sequence[Document], plan: Plan, seq_len: int, *, with_segments: bool) -> PackedRows:
    """Lay the pieces of a plan into rows, all at once."""
    if not documents:
        return PackedRows({}, np.empty(0, np.int64))
    flat = np.concatenate([document.tokens for document in documents])
    sizes = np.array([len(document.tokens) for document in documents])
    first = np.cumsum(sizes) - sizes
    local = np.arange(int(plan.count.sum())) - np.repeat(np.cumsum(plan.count) - plan.count, plan.count)
    source = np.repeat(first[plan.document] + plan.start, plan.count) + local
    target = np.repeat(plan.row * seq_len + plan.offset, plan.count) + local

    def lay(values: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        array = np.zeros((plan.rows * seq_len, *values.shape[1:]), dtype)
        array[target] = values
        return array.reshape(plan.rows, seq_len, *values.shape[1:])

    arrays = {
        "tokens": lay(flat[source], np.int32),
        "targets": lay(flat[source + 1], np.int32),
        "positions": lay(local, np.int32),
        "weights": lay(_weights(documents)[source + 1], np.float32),
    }
    if with_segments:
        arrays["segments"] = lay(np.repeat(plan.segment, plan.count), np.int32)
    # A column has one entry less per document than there are tokens.
    beside = np.repeat(first[plan.document] - plan.document + plan.start, plan.count) + local
    for name in documents[0].columns:
        column = np.concatenate([document.columns[name] for document in documents])
        arrays[name] = lay(column[beside], column.dtype)
    return PackedRows(arrays, np.bincount(plan.row, plan.count, plan.rows).astype(np.int64))


def _weights(documents: Sequence[Document]) -> np.ndarray:
    if all(document.weights is None for document in documents):
        return np.ones(sum(len(document.tokens) for document in documents), np.float32)
    ones = (np.ones(len(document.tokens), np.float32) for document in documents)
    return np.concatenate(
        [one if document.weights is None else document.weights for one, document in zip(ones, documents, strict=True)]
    )


@dataclasses.dataclass(frozen=True)
class Windows:
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
