"""Rows: sequences of a fixed length by index, which is all that a loader needs from a source."""

import dataclasses
from typing import Protocol

import numpy as np

# tokens, targets, positions int32 and weights float32 (0 where no loss), each [seq_len]. A source that packs several
# sequences into a row adds segments int32 (0 is padding). Without, a row is one sequence with padding at its end only,
# which no token before it can see, so attention needs no mask.
Row = dict[str, np.ndarray]


class Rows(Protocol):
    """Sequences by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


@dataclasses.dataclass(frozen=True)
class Source:
    """What a module of maxhydra.data.sources opens: rows to train on, and rows held out."""

    train: Rows
    evaluation: Rows


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


def split_stream(tokens: np.ndarray, seq_len: int, eval_fraction: float) -> Source:
    """Hold out the end of a stream. The first held-out token is predicted too, from the last one of training."""
    held_out = min(max(1, round(len(tokens) * eval_fraction)), len(tokens))
    boundary = len(tokens) - held_out
    return Source(
        train=Windows(tokens[:boundary], seq_len, keep_partial=False),
        evaluation=Windows(tokens[max(boundary - 1, 0) :], seq_len, keep_partial=True),
    )
