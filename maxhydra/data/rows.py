"""Rows: training sequences of a fixed length, and the documents that are packed into them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.vision import Vision
from maxhydra.data.packing import PackingPlan

# One training sequence: tokens, targets, positions int32 and weights float32 (0: no loss), each [seq_len]. A row of
# several documents also has segments int32 (0: padding). Without segments a row is one sequence with padding only at
# its end, which no earlier token can see, so causal attention needs no extra mask. Columns of dtype object stay on the
# host. Rows of evaluation data whose text is known have bytes int32: UTF-8 bytes of the text of each target.
Row = dict[str, np.ndarray]

# Column of the bytes of targets.
BYTES = "bytes"


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """Length, vocabulary and seed of the rows of a run."""

    seq_len: int
    vocab_size: int
    """Vocabulary size of the model; every token of a source must be below it."""
    seed: int
    vision: Vision | None = None
    """Images that the model takes; None: none."""
    audio: Audio | None = None
    """Audio that the model takes; None: none."""

    @classmethod
    def of(cls, config: Config) -> "RowSpec":
        """The rows of a training run."""
        seed = config.run.seed if config.run.data_seed is None else config.run.data_seed
        model = config.model
        return cls(
            seq_len=config.train.seq_len,
            vocab_size=model.vocab_size,
            seed=seed,
            vision=model.vision,
            audio=model.audio,
        )


NO_COLUMNS: Mapping[str, np.ndarray] = {}


@dataclasses.dataclass(frozen=True)
class Document:
    """A tokenized example that can share a row with others.

    A document of n tokens fills n - 1 positions of a row: each token predicts the next.
    """

    tokens: np.ndarray
    """int [n]."""
    weights: np.ndarray | None = None
    """float32 [n]: loss weight of predicting token i; None: 1 for every token."""
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=lambda: NO_COLUMNS)
    """Extra arrays [n - 1, ...], aligned with the first n - 1 tokens, such as a teacher's logits after each."""

    text_bytes: int | None = None
    """UTF-8 bytes of the text that the tokens stand for, special tokens excluded; None if the text is not known."""

    images: np.ndarray | None = None
    """Pixels [images, ...] of the images whose placeholders are among the tokens; None: rows have no images."""
    max_images: int = 0
    """Most images of a row that holds the document."""

    @property
    def num_targets(self) -> int:
        """Row positions that the document fills."""
        return max(0, len(self.tokens) - 1)


def packing_sizes(documents: Sequence[Document], seq_len: int) -> np.ndarray:
    """Positions that documents take in a row of seq_len, or as large a share of the row's images if that is more."""

    def size(document: Document) -> int:
        images = 0 if document.images is None else len(document.images)
        return max(document.num_targets, -(-images * seq_len // max(document.max_images, 1)))

    return np.array([size(document) for document in documents], np.int64)


def _pack_images(documents: Sequence[Document], plan: PackingPlan, first: np.ndarray) -> np.ndarray:
    """Pixels [rows, max_images, ...] of the images of a row's documents in order, then zeros."""
    shape = (plan.rows, documents[0].max_images, *first.shape[1:])
    packed, filled = np.zeros(shape, first.dtype), np.zeros(plan.rows, np.int64)
    for row, number in zip(plan.row.tolist(), plan.document.tolist(), strict=True):
        images = documents[number].images
        assert images is not None
        packed[row, filled[row] : filled[row] + len(images)] = images
        filled[row] += len(images)
    return packed


class Rows(Protocol):
    """Rows with random access by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


def make_row(tokens: np.ndarray, seq_len: int) -> Row:
    """Build a row of up to seq_len + 1 tokens: inputs and next-token targets, padded to seq_len."""
    count = len(tokens) - 1
    row = {name: np.zeros(seq_len, np.int32) for name in ("tokens", "targets")}
    row["tokens"][:count] = tokens[:-1]
    row["targets"][:count] = tokens[1:]
    row["positions"] = np.arange(seq_len, dtype=np.int32)
    row["weights"] = (row["positions"] < count).astype(np.float32)
    return row


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows that were packed from documents, as arrays [rows, seq_len]."""

    arrays: dict[str, np.ndarray]
    order: np.ndarray
    """Array row at each index; reordering moves no tokens."""
    filled: np.ndarray
    """Positions of each array row that hold a document."""
    cut: int = 0
    """Documents that were truncated or dropped because they are too long."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Row:
        at = self.order[index]
        return {name: array[at, ...] for name, array in self.arrays.items()}

    def num_filled(self, index: int) -> int:
        """Number of positions of a row that hold a document."""
        return int(self.filled[self.order[index]])

    def reorder(self, order: np.ndarray) -> "PackedRows":
        """Return the same rows in a different order."""
        return dataclasses.replace(self, order=self.order[order])


def stack_rows(rows: Sequence[Row]) -> PackedRows:
    """Stack rows that were built one by one; their positions are 0 in padding, or they have a `length`."""
    if not rows:
        return PackedRows({}, np.arange(0), np.arange(0))
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    filled = np.zeros(len(rows), np.int64) + arrays.get("length", 0)
    for name, array in arrays.items():
        if name.endswith("positions"):
            filled += 1 + np.count_nonzero(array, axis=1)
    return PackedRows(arrays, np.arange(len(rows)), filled)


def pack_rows(documents: Sequence[Document], plan: PackingPlan, seq_len: int, *, with_segments: bool) -> PackedRows:
    """Pack documents into rows according to a plan.

    The pieces of a row are adjacent, so each column is one concatenation of slices and row padding: four times as fast
    as one index per token.
    """
    if not plan.rows:
        return PackedRows({}, np.arange(0), np.arange(0), plan.cut)
    pieces = list(zip(plan.document.tolist(), plan.start.tolist(), plan.count.tolist(), strict=True))
    filled = np.bincount(plan.row, plan.count, plan.rows).astype(np.int64)
    ends_row = np.append(np.diff(plan.row) > 0, True)
    padding = np.where(ends_row, seq_len - filled[plan.row], 0).tolist()

    def concatenate(parts: Iterable[np.ndarray], dtype: np.dtype | type, shape: tuple[int, ...] = ()) -> np.ndarray:
        zeros = np.zeros((seq_len, *shape), dtype)
        slices: list[np.ndarray] = []
        for part, pad in zip(parts, padding, strict=True):
            slices.append(part)
            if pad:
                slices.append(zeros[:pad])
        array = np.empty((plan.rows * seq_len, *shape), dtype)
        np.concatenate(slices, out=array)
        return array.reshape(plan.rows, seq_len, *shape)

    tokens = [document.tokens for document in documents]
    positions = np.arange(seq_len, dtype=np.int32)
    arrays = {
        "tokens": concatenate((tokens[i][start : start + count] for i, start, count in pieces), np.int32),
        "targets": concatenate((tokens[i][start + 1 : start + 1 + count] for i, start, count in pieces), np.int32),
        "positions": concatenate((positions[:count] for _, _, count in pieces), np.int32),
    }
    weights = [document.weights for document in documents]
    if all(weight is None for weight in weights):
        arrays["weights"] = (positions < filled[:, None]).astype(np.float32)
    else:
        ones = np.ones(seq_len, np.float32)
        parts = (
            ones[:count] if (weight := weights[i]) is None else weight[start + 1 : start + 1 + count]
            for i, start, count in pieces
        )
        arrays["weights"] = concatenate(parts, np.float32)
    if with_segments:
        segment = np.stack([plan.segment.astype(np.int32), np.zeros(len(pieces), np.int32)], 1)
        arrays["segments"] = np.repeat(segment.ravel(), np.stack([plan.count, padding], 1).ravel())
        arrays["segments"] = arrays["segments"].reshape(plan.rows, seq_len)
    if (pixels := documents[0].images) is not None:
        arrays["images"] = _pack_images(documents, plan, pixels)
    for name, first in documents[0].columns.items():
        columns = [document.columns[name] for document in documents]
        if any(column.shape[1:] != first.shape[1:] for column in columns):
            sizes = sorted({column.shape[1:] for column in columns})
            raise ConfigError(
                Problem("data", f"all records need the same size of {name}, not {', '.join(map(str, sizes))}")
            )
        parts = (columns[i][start : start + count] for i, start, count in pieces)
        arrays[name] = concatenate(parts, first.dtype, first.shape[1:])
    return PackedRows(arrays, np.arange(plan.rows), filled, plan.cut)


@dataclasses.dataclass(frozen=True)
class ContiguousRows:
    """Rows cut from one contiguous token stream; each token after the first is the target of exactly one row.

    Row k reads tokens k * seq_len to (k + 1) * seq_len - 1 and predicts the token after each. A remainder at the end
    that does not fill a row is dropped, or kept as a padded row.
    """

    tokens: np.ndarray
    seq_len: int
    keep_partial: bool
    token_bytes: np.ndarray | None = None
    """Bytes of the text of each token, for evaluation rows."""

    def __len__(self) -> int:
        targets = max(len(self.tokens) - 1, 0)
        return -(-targets // self.seq_len) if self.keep_partial else targets // self.seq_len

    def __getitem__(self, index: int) -> Row:
        start = index * self.seq_len
        row = make_row(self.tokens[start : start + self.seq_len + 1], self.seq_len)
        if self.token_bytes is not None:
            row[BYTES] = np.zeros(self.seq_len, np.int32)
            targets = self.token_bytes[start + 1 : start + self.seq_len + 1]
            row[BYTES][: len(targets)] = targets
        return row
