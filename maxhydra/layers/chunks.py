"""Chunked attention (Llama 4, 2025): a token sees only its own chunk of its sequence. B batch, T tokens."""

import jax
import jax.numpy as jnp


def chunks(segments_BT: jax.Array | None, positions_BT: jax.Array, chunk: int | None) -> jax.Array | None:
    """Where sequences share a row, which chunk of which sequence a token belongs to, 0 for padding.

    Chunks are counted from the beginning of each sequence, wherever it lies in its row.
    """
    if segments_BT is None or chunk is None:
        return segments_BT
    is_first_BT = (segments_BT != jnp.roll(segments_BT, 1, axis=1)).at[:, 0].set(True)
    numbers_BT = jnp.cumsum(is_first_BT | (positions_BT % chunk == 0), axis=1)
    return jnp.where(segments_BT == 0, 0, numbers_BT)
