"""Log-probabilities of given tokens, with a gradient, a part of each sequence at a time.

Unlike cross-entropy, whose gradient is made with its value, what is done with these is not known yet: the backward pass
makes the logits of a chunk once more.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from maxhydra.kernels.linear_cross_entropy.xla import at_targets, is_target
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

T = TypeVar("T")


class ScoredTokens(NamedTuple):
    """What a forward pass gives a loss."""

    logprobs: jax.Array
    sides: Any
    """What layers tell besides."""


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Log-probabilities of the targets of a batch whose rows hold a document each."""

    model: ModelDef
    sharder: Sharder
    chunk: int

    def __call__(
        self, weights: Any, batch: Mapping[str, jax.Array], key: jax.Array | None, *, is_adapted: bool
    ) -> jax.Array:
        """[B, S], of the model with or without its adapter; no key: no dropout."""
        return self.scored(weights, batch, key, is_adapted=is_adapted).logprobs

    def scored(
        self, weights: Any, batch: Mapping[str, jax.Array], key: jax.Array | None, *, is_adapted: bool
    ) -> ScoredTokens:
        """The same, with what layers tell besides."""
        context = Context.of_batch(batch, self.sharder, key, is_adapted=is_adapted)
        forward = self.model.forward(weights, batch["tokens"], context)
        logprobs = token_logprobs(
            lambda hidden: self.model.logits(weights, hidden, self.sharder),
            forward.hidden_BTD,
            batch["targets"],
            chunk=self.chunk,
        )
        return ScoredTokens(logprobs, forward.sides)


def token_logprobs(
    logits_of: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array, *, chunk: int
) -> jax.Array:
    """log p(target) of each place, float32 [B, S], to be differentiated by `hidden` and what `logits_of` closes over.

    With `chunk`, the logits of only so many places of each sequence exist at a time, forward and backward.
    """
    with jax.named_scope("logprobs"):
        return map_sequence_chunks(
            lambda hidden, targets: target_logprobs(logits_of(hidden), targets), hidden, targets, chunk=chunk
        )


def map_sequence_chunks(function: Callable[..., T], *arrays: jax.Array, chunk: int) -> T:
    """A function of arrays [B, S, ...] that treats every place alone, `chunk` places at a time (0: all at once).

    Its results, a tree of [B, S, ...], are the same either way; what it makes on the way is made again for the
    gradient, and never exists for more than a chunk.
    """
    length = arrays[0].shape[1]
    if not 0 < chunk < length:
        return function(*arrays)

    # Chunks are what the scan runs over, not slices of what it closes over: their gradients are then written once.
    def apart(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], length // chunk, chunk, *x.shape[2:]), 1, 0)

    def together(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], length, *x.shape[3:])

    @jax.checkpoint
    def one(_: None, parts: tuple[jax.Array, ...]) -> tuple[None, Any]:
        return None, function(*parts)

    return jax.tree.map(together, jax.lax.scan(one, None, tuple(map(apart, arrays)))[1])


@jax.custom_vjp
def target_logprobs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """log softmax(logits)[target], float32. Between the passes it keeps the logits alone, in the format they have."""
    return at_targets(logits.astype(jnp.float32), targets)[0]


def _forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    logprobs, normaliser, _ = at_targets(logits.astype(jnp.float32), targets)
    return logprobs, (logits, targets, normaliser)


def _backward(kept: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, normaliser = kept
    softmax = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
    return (cotangent[..., None] * (is_target(logits, targets) - softmax)).astype(logits.dtype), None


target_logprobs.defvjp(_forward, _backward)
