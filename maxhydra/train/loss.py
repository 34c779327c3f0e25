"""Cross-entropy that need not hold all logits at once, as sums that add up over chunks, micro-batches and devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Sums = dict[str, jax.Array]


@jax.named_scope("loss")
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

    With `chunk`, the logits of only so many positions of each sequence exist at a time: they are made again in the
    backward pass, which trades one more head product for seq_len / chunk times less memory.
    """

    def part(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> Sums:
        logits = logits_of(hidden)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        # A masked sum, not a gather: it fuses with the softmax and stays local when the vocabulary is sharded.
        is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
        nll = normaliser - jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        loss = nll + z_loss * jnp.square(normaliser)
        return {"loss": jnp.sum(weights * loss), "nll": jnp.sum(weights * nll), "weight": jnp.sum(weights)}

    length = targets.shape[1]
    if chunk == 0 or chunk >= length:
        return part(hidden, targets, weights)

    def add(sums: Sums, start: jax.Array) -> tuple[Sums, None]:
        here = [jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1) for x in (hidden, targets, weights)]
        return jax.tree.map(jnp.add, sums, jax.checkpoint(part)(*here)), None

    zero = jnp.zeros((), weights.dtype)
    sums, _ = jax.lax.scan(add, {"loss": zero, "nll": zero, "weight": zero}, jnp.arange(0, length, chunk))
    return sums
