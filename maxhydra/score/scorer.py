"""Scores sequences in batches of similar length. B sequences, S positions, V vocabulary."""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema import model as config
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.score.files import Sequence, SequenceScore
from maxhydra.sharding import Sharder
from maxhydra.train.logprobs import target_logprobs, token_logprobs

# Positions whose logits are materialized at a time, unless all logits are returned.
CHUNK = 512
# Smallest padded length.
MIN_LENGTH = 16


@dataclasses.dataclass(frozen=True)
class SequenceScorer:
    """Runs a model over batches of padded sequences."""

    model: ModelDef
    weights: Any
    sharder: Sharder
    batch: int
    with_logits: bool

    def __call__(self, rows: list[Sequence]) -> Iterator[SequenceScore]:
        """Yield a score per sequence, shortest first to minimize padding."""
        order = sorted(range(len(rows)), key=lambda number: len(rows[number].ids))
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            yield from self._score_batch(numbers, [rows[number].ids for number in numbers])

    def _score_batch(self, numbers: list[int], sequences: list[np.ndarray]) -> Iterator[SequenceScore]:
        shape = _round_up(self.batch, self.sharder.ways("act_batch")), self._padded_length(len(sequences[-1]))
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
        logprobs, logits = self._program(self.weights, tokens, segments)
        logprobs = np.asarray(logprobs)
        for row, (number, ids) in enumerate(zip(numbers, sequences, strict=True)):
            row_logits = None if logits is None else np.asarray(logits[row, : len(ids)])
            yield SequenceScore(number, logprobs[row, : len(ids) - 1], row_logits)

    def _padded_length(self, longest: int) -> int:
        """Round up to a power of two, so that few programs are compiled, and to a multiple of the length shards."""
        power = 1 << (max(longest, MIN_LENGTH) - 1).bit_length()
        return _round_up(power, self.sharder.ways("act_length"))

    @cached_property
    def _program(self) -> Any:
        """Map weights, tokens [B, S] and segments [B, S] to next-token log-probabilities [B, S] and logits or None."""
        model, sharder = self.model, self.sharder

        def score(weights: Any, tokens: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            ctx = Context(positions=positions, segments=segments, sharder=sharder, cache=None, dropout_key=None)
            hidden, _ = model.hidden(weights, tokens, ctx)
            targets = jnp.roll(tokens, -1, axis=1)
            if self.with_logits:
                logits = model.logits(weights, hidden, sharder).astype(jnp.float32)
                return target_logprobs(logits, targets), logits
            chunk = CHUNK if tokens.shape[1] % CHUNK == 0 else 0
            return token_logprobs(lambda x: model.logits(weights, x, sharder), hidden, targets, chunk=chunk), None

        return jax.jit(score)


def without_capacity_limit(model: config.Model) -> config.Model:
    """Return the model with dropless experts: with a capacity, scores would depend on the padding of the batch."""
    kinds = {
        name: dataclasses.replace(kind, moe=dataclasses.replace(kind.moe, capacity_factor=None))
        for name, kind in model.kinds.items()
    }
    return dataclasses.replace(model, kinds=kinds)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
