"""Synthetic tokens: to measure speed, and to see a loss fall without any text.

A row counts up from a random token by a random step of 1 to STEPS, modulo the vocabulary; on average one token in NOISE
is replaced by a random one. A model that infers the step from the context can predict the rest, except for the noise.
"""

import dataclasses

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.rows import Row, RowSpec, make_row
from maxhydra.data.sources import RowSource

ROWS = 2**20
STEPS = 8
NOISE = 16


@dataclasses.dataclass(frozen=True)
class Counting:
    """Rows `first` to `first + count - 1`; each is a function of seed and index alone."""

    first: int
    count: int
    spec: RowSpec

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        seq_len, vocab_size = self.spec.seq_len, self.spec.vocab_size
        rng = np.random.default_rng((self.spec.seed, self.first + index))
        start, step = rng.integers(vocab_size), rng.integers(1, STEPS + 1)
        tokens = (start + step * np.arange(seq_len + 1)) % vocab_size
        noisy = rng.random(seq_len + 1) < 1 / NOISE
        return make_row(np.where(noisy, rng.integers(vocab_size, size=seq_len + 1), tokens), seq_len)


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RowSource:
    held_out = max(1, round(ROWS * corpus.eval_fraction))
    boundary = ROWS - held_out
    return RowSource(train=Counting(0, boundary, spec), evaluation=Counting(boundary, held_out, spec))
