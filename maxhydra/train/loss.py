"""Cross-entropy over the head's logits, as sums that add up over chunks, micro-batches and devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.kernels.linear_cross_entropy import linear_cross_entropy
from maxhydra.kernels.place import Place
from maxhydra.layers.backends import Wanted, explained

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
    wanted: Wanted,
    place: Place | None = None,
) -> Sums:
    """Sums over tokens of weight, nll = logsumexp(z) - z[target], and loss = nll + z_loss * logsumexp(z)^2.

    `loss` is what is to be differentiated; `nll` and `weight` are constants to that.
    """
    with jax.named_scope("loss"), explained():
        loss, nll = linear_cross_entropy(
            logits_of, hidden, targets, weights, z_loss=z_loss, chunk=chunk, **wanted._asdict(), place=place
        )
        return {"loss": loss, "nll": nll, "weight": jax.lax.stop_gradient(jnp.sum(weights))}
