"""Cross-entropy over the head's logits, as sums that add up over chunks, micro-batches and devices.

The gradient is made together with the value: while a chunk's logits are at hand they turn into their own gradient,
which goes back through the head at once. No logits wait for the backward pass, and none are computed twice.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.train.logprobs import at_targets

Tree = Any
# Arrays that add up over micro-batches, by name; `told` among them is a tree of such.
Sums = dict[str, Any]


def cross_entropy(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float,
    chunk: int,
) -> Sums:
    """Sums over tokens of weight, nll = logsumexp(z) - z[target], and loss = nll + z_loss * logsumexp(z)^2.

    With `chunk`, the logits of only so many positions of each sequence exist at a time. `loss` is what is to be
    differentiated, by `hidden`, `weights` and what `logits_of` closes over; `nll` and `weight` are constants to that.
    """
    length = targets.shape[1]
    chunk = chunk if 0 < chunk < length else length
    head, held = jax.closure_convert(logits_of, hidden[:, :chunk])
    with jax.named_scope("loss"):
        loss, nll = _sums(_Objective(head, z_loss, chunk), (hidden, weights, held), targets)
        return {"loss": loss, "nll": jax.lax.stop_gradient(nll), "weight": jax.lax.stop_gradient(jnp.sum(weights))}


@dataclasses.dataclass(frozen=True)
class _Objective:
    """The static part of a call."""

    head: Callable[..., jax.Array]
    """(hidden, *held) -> logits."""
    z_loss: float
    chunk: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(objective: _Objective, inputs: Tree, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden, weights, held = inputs

    def part(hidden: jax.Array, weights: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, nll, _ = _per_token(objective, objective.head(hidden, *held), targets)
        return jnp.sum(weights * losses), jnp.sum(weights * nll)

    def add(sums: Tree, start: jax.Array) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, sums, part(*_cut(objective, start, hidden, weights, targets))), None

    if objective.chunk == targets.shape[1]:
        return part(hidden, weights, targets)
    zero = jnp.zeros((), weights.dtype)
    return jax.lax.scan(add, (zero, zero), jnp.arange(0, targets.shape[1], objective.chunk))[0]


def _forward(objective: _Objective, inputs: Tree, targets: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Tree]:
    """The sums, and the gradient of the loss by the inputs."""
    hidden, weights, held = inputs

    def part(hidden: jax.Array, weights: jax.Array, targets: jax.Array) -> tuple[Tree, Tree, Tree]:
        logits, pull_back = jax.vjp(objective.head, hidden, *held)
        losses, nll, slope = _per_token(objective, logits, targets)
        # Kept from being fused into the two products that read it: each would take the exponentials again.
        d_logits = jax.lax.optimization_barrier((weights[..., None] * slope).astype(hidden.dtype))
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


def _backward(objective: _Objective, gradient: Tree, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
    return jax.tree.map(lambda g: cotangents[0].astype(g.dtype) * g, gradient), None


_sums.defvjp(_forward, _backward)


def _cut(objective: _Objective, start: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """One chunk of every sequence."""
    return [jax.lax.dynamic_slice_in_dim(x, start, objective.chunk, axis=1) for x in arrays]


def _per_token(objective: _Objective, logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss and nll of each token in float32, and the slope of the loss by each of its logits."""
    wide = logits.astype(jnp.float32)
    logprobs, normaliser, is_target = at_targets(wide, targets)
    nll = -logprobs
    losses = nll + objective.z_loss * jnp.square(normaliser)
    softmax = jnp.exp(wide - normaliser[..., None])
    slope = softmax * (1 + 2 * objective.z_loss * normaliser)[..., None] - is_target
    return losses, nll, slope
