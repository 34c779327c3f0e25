"""What mixers that attend share: the way to the kernels, and where tokens stand that meet a cache."""

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention import Request, attention
from maxhydra.layers.backends import Wanted, explained
from maxhydra.layers.context import Context


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    ctx: Context,
    *,
    wanted: Wanted,
    **tokens: jax.Array | None,
) -> jax.Array:
    """What the queries gather; a backend that was asked for and cannot serve is the config's mistake."""
    backend, sizes = wanted
    with explained():
        return attention(q_BTNH, k_BSKH, v_BSKH, request, backend=backend, sizes=sizes, place=ctx.place, **tokens)


def cached_positions(ctx: Context) -> jax.Array:
    """Where the tokens stand that meet a cache, -1 for padding."""
    return ctx.positions if ctx.segments is None else jnp.where(ctx.segments == 0, -1, ctx.positions)
