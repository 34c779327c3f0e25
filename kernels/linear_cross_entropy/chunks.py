"""The loss a part of each sequence at a time, and its gradient made together with its value.

While a chunk's logits are at hand they turn into their own gradient, which goes back through the head at once. No
logits wait for the backward pass, and none are computed twice.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.linear_cross_entropy import xla

Tree = Any


class PerToken(Protocol):
    """(logits [..., V], targets, weights) -> loss and nll of each token in float32, and the gradient of
    sum(weights * loss) by the logits in the format asked for."""

    def __call__(
        self, logits: jax.Array, targets: jax.Array, weights: jax.Array, *, z_loss: float, dtype: np.dtype
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True)
class Objective:
    """The static part of a call."""

    head: Callable[..., jax.Array]
    """(hidden, *held) -> logits."""
    per_token: PerToken
    z_loss: float
    chunk: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sums(objective: Objective, inputs: Tree, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the weighted loss and nll over all tokens; `inputs`: hidden, weights and what the head closes over."""
    hidden, weights, held = inputs

    def part(hidden: jax.Array, weights: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = objective.head(hidden, *held)
        losses, nll, _ = xla.per_token(logits, targets, weights, z_loss=objective.z_loss, dtype=hidden.dtype)
        return jnp.sum(weights * losses), jnp.sum(weights * nll)

    def add(sums: Tree, start: jax.Array) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, sums, part(*_cut(objective, start, hidden, weights, targets))), None

    if objective.chunk == targets.shape[1]:
        return part(hidden, weights, targets)
    zero = jnp.zeros((), weights.dtype)
    return jax.lax.scan(add, (zero, zero), jnp.arange(0, targets.shape[1], objective.chunk))[0]


def _forward(objective: Objective, inputs: Tree, targets: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Tree]:
    """The sums, and the gradient of the loss by the inputs."""
    hidden, weights, held = inputs

    def part(hidden: jax.Array, weights: jax.Array, targets: jax.Array) -> tuple[Tree, Tree, Tree]:
        logits, pull_back = jax.vjp(objective.head, hidden, *held)
        losses, nll, d_logits = objective.per_token(
            logits, targets, weights, z_loss=objective.z_loss, dtype=hidden.dtype
        )
        d_hidden, *d_held = pull_back(d_logits.astype(logits.dtype))
        return (jnp.sum(weights * losses), jnp.sum(weights * nll)), d_held, (d_hidden, losses)

    if objective.chunk == targets.shape[1]:
        sums, d_held, (d_hidden, d_weights) = part(hidden, weights, targets)
        return sums, (d_hidden, d_weights, d_held)

    def add(total: Tree, start: jax.Array) -> tuple[Tree, Tree]:
        *summed, own = part(*_cut(objective, start, hidden, weights, targets))
        return jax.tree.map(jnp.add, total, tuple(summed)), own

    zero = jnp.zeros((), weights.dtype)
    zeros = ((zero, zero), jax.tree.map(jnp.zeros_like, held))
    (sums, d_held), parts = jax.lax.scan(add, zeros, jnp.arange(0, targets.shape[1], objective.chunk))
    d_hidden, d_weights = (jnp.moveaxis(x, 0, 1).reshape(*targets.shape, *x.shape[3:]) for x in parts)
    return sums, (d_hidden, d_weights, d_held)


def _backward(objective: Objective, gradient: Tree, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
    return jax.tree.map(lambda g: cotangents[0].astype(g.dtype) * g, gradient), None


sums.defvjp(_forward, _backward)


def _cut(objective: Objective, start: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """One chunk of every sequence."""
    return [jax.lax.dynamic_slice_in_dim(x, start, objective.chunk, axis=1) for x in arrays]
