"""What mixers that attend share: the way to the kernels and into a cache, and where tokens stand that meet one."""

from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention import Request, attention
from maxhydra.kernels.paged_attention import Pages, filled
from maxhydra.layers.context import Context
from maxhydra.layers.kernel_options import KernelChoice, kernel_errors_as_config_errors


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    ctx: Context,
    *,
    wanted: KernelChoice,
    **tokens: jax.Array | None,
) -> jax.Array:
    """What the queries gather; a backend that was asked for and cannot serve is the config's mistake."""
    backend, sizes = wanted
    with kernel_errors_as_config_errors():
        return attention(q_BTNH, k_BSKH, v_BSKH, request, backend=backend, sizes=sizes, place=ctx.place, **tokens)


def cached_positions(ctx: Context) -> jax.Array:
    """Where the tokens stand that meet a cache, -1 for padding."""
    return ctx.positions if ctx.segments is None else jnp.where(ctx.segments == 0, -1, ctx.positions)


def written(key_BTKH: jax.Array, value_BTKH: jax.Array, ctx: Context) -> Any:
    """The cache with the tokens at hand in it."""
    cache, at = ctx.cache, (cached_positions(ctx), ctx.rows)
    if not ctx.is_fresh:
        return cache.insert(key_BTKH, value_BTKH, *at)
    pages: Pages | None = cache.pages(*at)
    begun = None if pages is None else filled(pages, key_BTKH, value_BTKH, ctx.place)
    return cache.begin(key_BTKH, value_BTKH, *at) if begun is None else cache.with_pages(begun)
