"""Tokens of neighbouring devices, for operations whose reach along a sharded sequence is limited."""

import jax
import jax.numpy as jnp

from maxhydra.kernels.placement import Entry


def with_previous_tokens(x_BT: jax.Array, count: int, axis: Entry, size: int) -> jax.Array:
    """A device's tokens behind the `count` tokens before them, zeros before the first; runs under shard_map.

    `axis`: the mesh axes, of `size` devices, over which the sequence is sharded.
    """
    length = x_BT.shape[1]
    parts, missing, distance = [x_BT], count, 1
    while missing > 0:
        pairs = [(i, i + distance) for i in range(size - distance)]
        parts.insert(0, jax.lax.ppermute(x_BT[:, max(0, length - missing) :], axis, pairs))
        missing, distance = missing - length, distance + 1
    return jnp.concatenate(parts, axis=1)
