"""Sequences through a model, those of like length together. B sequences, S places, V vocabulary."""

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
from maxhydra.score.sequences import Sequence
from maxhydra.sharding import Sharder
from maxhydra.train.logprobs import target_logprobs, token_logprobs

# Places whose logits exist at a time, where they are not asked for.
CHUNK = 512
SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class SequenceScore:
    """A sequence by its number: log-probabilities of its tokens after the first, and all logits where asked for."""

    number: int
    logprobs: np.ndarray
    logits: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class SequenceScorer:
    """The model over batches of padded sequences."""

    model: ModelDef
    weights: Any
    sharder: Sharder
    batch: int
    with_logits: bool

    def __call__(self, rows: list[Sequence]) -> Iterator[SequenceScore]:
        """Shortest first, so that little is padding."""
        order = sorted(range(len(rows)), key=lambda number: len(rows[number].ids))
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            yield from self._scored(numbers, [rows[number].ids for number in numbers])

    def _scored(self, numbers: list[int], sequences: list[np.ndarray]) -> Iterator[SequenceScore]:
        shape = _rounded(self.batch, self.sharder.ways("act_batch")), self._length(len(sequences[-1]))
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
        logprobs, logits = self._program(self.weights, tokens, segments)
        logprobs = np.asarray(logprobs)
        for row, (number, ids) in enumerate(zip(numbers, sequences, strict=True)):
            after = None if logits is None else np.asarray(logits[row, : len(ids)])
            yield SequenceScore(number, logprobs[row, : len(ids) - 1], after)

    def _length(self, longest: int) -> int:
        """Powers of two, so that few programs serve sequences of any length, in equal parts on every device."""
        power = 1 << (max(longest, SHORTEST) - 1).bit_length()
        return _rounded(power, self.sharder.ways("act_length"))

    @cached_property
    def _program(self) -> Any:
        """(weights, tokens [B, S], segments [B, S]) -> log-probabilities of the next tokens [B, S], logits or None."""
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


def dropless(model: config.Model) -> config.Model:
    """Its experts take all tokens that come: a share of a padded row would hang on what else is in its batch."""
    kinds = {
        name: dataclasses.replace(kind, moe=dataclasses.replace(kind.moe, capacity_factor=None))
        for name, kind in model.kinds.items()
    }
    return dataclasses.replace(model, kinds=kinds)


def _rounded(count: int, parts: int) -> int:
    return -(-count // parts) * parts
