"""Differentiable log-probabilities of given tokens, computed in chunks of each sequence.

Used by the losses of rl/, align/ and distill/ and by score/. Cross-entropy computes its gradient together with its
value; here the use of the values is not known yet, so the backward pass recomputes the logits of each chunk.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from maxhydra.kernels.linear_cross_entropy.xla import is_target, logprobs_at_targets
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

T = TypeVar("T")


class ScoredTokens(NamedTuple):
    """Token log-probabilities of a forward pass, and the aux outputs of its layers."""

    logprobs: jax.Array
    aux: Any


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Log-probabilities of the targets of a batch that has one document per row."""

    model: ModelDef
    sharder: Sharder
    chunk: int

    def __call__(
        self, weights: Any, batch: Mapping[str, jax.Array], key: jax.Array | None, *, is_adapted: bool
    ) -> jax.Array:
        """Log-probabilities [B, S] of the model with or without its adapter; without a key, dropout is off."""
        return self.score(weights, batch, key, is_adapted=is_adapted).logprobs

    def score(
        self, weights: Any, batch: Mapping[str, jax.Array], key: jax.Array | None, *, is_adapted: bool
    ) -> ScoredTokens:
        """Like calling the scorer, and also returns the aux outputs of the layers."""
        context = Context.of_batch(batch, self.sharder, key, is_adapted=is_adapted)
        forward = self.model.forward(weights, batch["tokens"], context)
        logprobs = token_logprobs(
            lambda hidden: self.model.logits(weights, hidden, self.sharder),
            forward.hidden_BTD,
            batch["targets"],
            chunk=self.chunk,
        )
        return ScoredTokens(logprobs, forward.aux)


def token_logprobs(
    logits_of: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array, *, chunk: int
) -> jax.Array:
    """log p(target) at each position, float32 [B, S], differentiable in `hidden` and the closure of `logits_of`.

    With `chunk`, the logits of only `chunk` positions per sequence exist at a time, forward and backward.
    """
    with jax.named_scope("logprobs"):
        return map_sequence_chunks(
            lambda hidden, targets: target_logprobs(logits_of(hidden), targets), hidden, targets, chunk=chunk
        )


def map_sequence_chunks(function: Callable[..., T], *arrays: jax.Array, chunk: int) -> T:
    """Apply a position-wise function of arrays [B, S, ...] to `chunk` positions at a time (0: all at once).

    The result, a tree of [B, S, ...], does not depend on `chunk`. Intermediates are rematerialized in the backward pass
    and never exist for more than one chunk.
    """
    length = arrays[0].shape[1]
    if not 0 < chunk < length:
        return function(*arrays)

    # Chunks are scanned inputs rather than slices of a closed-over array, so that each gradient is written once.
    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], length // chunk, chunk, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], length, *x.shape[3:])

    @jax.checkpoint
    def apply_chunk(_: None, chunks: tuple[jax.Array, ...]) -> tuple[None, Any]:
        return None, function(*chunks)

    return jax.tree.map(join, jax.lax.scan(apply_chunk, None, tuple(map(split, arrays)))[1])


@jax.custom_vjp
def target_logprobs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """log softmax(logits)[target] in float32. The only residual of its size is the logits, in their own dtype."""
    return logprobs_at_targets(logits.astype(jnp.float32), targets)[0]


def _forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    logprobs, normaliser, _ = logprobs_at_targets(logits.astype(jnp.float32), targets)
    return logprobs, (logits, targets, normaliser)


def _backward(residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, normaliser = residuals
    softmax = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
    return (cotangent[..., None] * (is_target(logits, targets) - softmax)).astype(logits.dtype), None


target_logprobs.defvjp(_forward, _backward)
