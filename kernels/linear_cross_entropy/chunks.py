"""The loss one chunk of each sequence at a time, with its gradient computed in the forward pass.

While a chunk's logits exist they are replaced by their own gradient, which is propagated through the head at once. No
logits are saved for the backward pass, and none are recomputed.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from maxhydra.kernels.linear_cross_entropy import xla

Tree = Any


class PerToken(Protocol):
    """(logits [..., V], targets, weights) -> loss and nll of each token in float32, and the gradient of
    sum(weights * loss) with respect to the logits, in `dtype`."""

    def __call__(
        self, logits: jax.Array, targets: jax.Array, weights: jax.Array, *, z_loss: float, dtype: np.dtype
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """The static arguments of a call."""

    head: Callable[..., jax.Array]
    """(hidden, *closed_over) -> logits."""
    per_token: PerToken
    z_loss: float
    chunk: int
    value: PerToken = xla.per_token
    """As `per_token`, where only the values are used."""
    sum_dtype: DTypeLike | None = None
    """Dtype in which gradients of closed-over arrays are summed over chunks; None: their own."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_sums(chunked: ChunkedLoss, inputs: Tree, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum the weighted loss and nll over all tokens; `inputs`: hidden, weights and arrays the head closes over."""
    hidden, weights, closed_over = inputs

    def chunk_terms(hidden: jax.Array, weights: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = chunked.head(hidden, *closed_over)
        losses, nll, _ = chunked.value(logits, targets, weights, z_loss=chunked.z_loss, dtype=hidden.dtype)
        return jnp.sum(weights * losses), jnp.sum(weights * nll)

    def add(loss_sums: Tree, start: jax.Array) -> tuple[Tree, None]:
        return jax.tree.map(
            jnp.add, loss_sums, chunk_terms(*_slice_chunk(chunked, start, hidden, weights, targets))
        ), None

    if chunked.chunk == targets.shape[1]:
        return chunk_terms(hidden, weights, targets)
    zero = jnp.zeros((), weights.dtype)
    return jax.lax.scan(add, (zero, zero), jnp.arange(0, targets.shape[1], chunked.chunk))[0]


def sums_and_gradient(
    chunked: ChunkedLoss, inputs: Tree, targets: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Tree]:
    """The sums, and the gradient of the loss with respect to the inputs."""
    hidden, weights, closed_over = inputs

    def chunk_terms(hidden: jax.Array, weights: jax.Array, targets: jax.Array) -> tuple[Tree, Tree, Tree]:
        logits, pull_back = jax.vjp(chunked.head, hidden, *closed_over)
        losses, nll, d_logits = chunked.per_token(logits, targets, weights, z_loss=chunked.z_loss, dtype=hidden.dtype)
        d_hidden, *d_closed_over = pull_back(d_logits.astype(logits.dtype))
        return (jnp.sum(weights * losses), jnp.sum(weights * nll)), d_closed_over, (d_hidden, losses)

    if chunked.chunk == targets.shape[1]:
        loss_sums, d_closed_over, (d_hidden, d_weights) = chunk_terms(hidden, weights, targets)
        return loss_sums, (d_hidden, d_weights, d_closed_over)

    def add(total: Tree, start: jax.Array) -> tuple[Tree, Tree]:
        *totals, per_position = chunk_terms(*_slice_chunk(chunked, start, hidden, weights, targets))
        return jax.tree.map(jnp.add, total, tuple(totals)), per_position

    zero = jnp.zeros((), weights.dtype)
    zeros = ((zero, zero), [jnp.zeros_like(x, dtype=chunked.sum_dtype) for x in closed_over])
    (loss_sums, d_closed_over), parts = jax.lax.scan(add, zeros, jnp.arange(0, targets.shape[1], chunked.chunk))
    d_hidden, d_weights = (jnp.moveaxis(x, 0, 1).reshape(*targets.shape, *x.shape[3:]) for x in parts)
    return loss_sums, (d_hidden, d_weights, d_closed_over)


def token_nll(chunked: ChunkedLoss, inputs: Tree, targets: jax.Array) -> jax.Array:
    """The nll of every token [B, S]; `inputs`: hidden and the arrays the head closes over. It has no gradient."""
    hidden, closed_over = inputs

    def chunk_nll(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits, weights = chunked.head(hidden, *closed_over), jnp.ones(targets.shape, jnp.float32)
        return chunked.value(logits, targets, weights, z_loss=0.0, dtype=hidden.dtype)[1]

    if chunked.chunk == targets.shape[1]:
        return chunk_nll(hidden, targets)
    starts = jnp.arange(0, targets.shape[1], chunked.chunk)
    parts = jax.lax.map(lambda start: chunk_nll(*_slice_chunk(chunked, start, hidden, targets)), starts)
    return jnp.moveaxis(parts, 0, 1).reshape(targets.shape)


def _backward(chunked: ChunkedLoss, gradient: Tree, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
    return jax.tree.map(lambda g: cotangents[0].astype(g.dtype) * g, gradient), None


loss_sums.defvjp(sums_and_gradient, _backward)


def _slice_chunk(chunked: ChunkedLoss, start: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Slice one chunk of every sequence."""
    return [jax.lax.dynamic_slice_in_dim(x, start, chunked.chunk, axis=1) for x in arrays]
