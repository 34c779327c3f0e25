"""The kernel for TPUs: a program reads a few pages of all heads of one row, and the next programs continue the softmax.

XLA applies the rotary embedding and writes the new tokens to their pages, in place: a token is smaller than the
smallest block that a TPU copies. Pages are looked up in the table while earlier ones are read. Shape letters as in the
package.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxhydra.kernels.attention.spec import Request
from maxhydra.kernels.paged_attention.pages import Pages

# Tokens that a program reads: one vector register's lanes, so that logits fill them.
BLOCK = 128
# Shape of a vector register; queries that share a head are padded to the sublanes.
SUBLANES, LANES = 8, 128
# A page that is not a whole number of vector registers would be padded in memory.
PAGE_MULTIPLE = SUBLANES
LOWEST = float(jnp.finfo(jnp.float32).min)


def attention(
    heads_SBMH: jax.Array,
    rope_factors: tuple[jax.Array, jax.Array] | None,
    pages: Pages,
    request: Request,
    *,
    then: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Pages]:
    """`then` is ignored: XLA prefetches weights automatically if memory allows."""
    del then
    _, B, M, H = heads_SBMH.shape
    P, K, Z, _ = pages.key_PKZH.shape
    N = M - 2 * K
    heads_BMH = jnp.sum(heads_SBMH, axis=0, dtype=jnp.float32).astype(pages.key_PKZH.dtype)
    q_BNH, key_BKH, value_BKH = jnp.split(heads_BMH, (N, N + K), axis=1)
    if rope_factors is not None:
        q_BNH, key_BKH = (_rotate(x, rope_factors) for x in (q_BNH, key_BKH))
    last_B = jnp.maximum(pages.length_B - 1, 0)
    page_B = jnp.take_along_axis(pages.table_BW, last_B[:, None] // Z, axis=1)[:, 0]
    position = jnp.where(pages.length_B > 0, page_B, P), slice(None), last_B % Z
    pages = pages._replace(
        key_PKZH=pages.key_PKZH.at[position].set(key_BKH, mode="drop"),
        value_PKZH=pages.value_PKZH.at[position].set(value_BKH, mode="drop"),
    )
    padding = -(N // K) % SUBLANES
    q_BKGH = jnp.pad(q_BNH.reshape(B, K, N // K, H), ((0, 0), (0, 0), (0, padding), (0, 0)))
    out_BKGH = _attend(q_BKGH, pages, request, interpret=interpret)
    return out_BKGH[:, :, : N // K].reshape(B, N, H), pages


def _attend(q_BKGH: jax.Array, pages: Pages, request: Request, *, interpret: bool) -> jax.Array:
    B, K, G, H = q_BKGH.shape
    Z, W = pages.key_PKZH.shape[2], pages.table_BW.shape[1]
    pages_per_block = min(max(BLOCK // Z, 1), W)

    def page(b: jax.Array, block: jax.Array, table_ref: Any, length_ref: Any, *, nth: int) -> tuple[Any, ...]:
        """Map pages that are not visible to the nearest visible one, which is then not copied again."""
        first, last = _visible_pages(length_ref[b], request, Z)
        return table_ref[b, jnp.clip(block * pages_per_block + nth, first, last)], 0, 0, 0

    read = [pl.BlockSpec((None, K, Z, H), partial(page, nth=nth)) for nth in range(pages_per_block)]
    row = pl.BlockSpec((None, K, G, H), lambda b, block, *_: (b, 0, 0, 0))
    return pl.pallas_call(
        partial(_kernel, request=request, pages_per_block=pages_per_block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, pl.cdiv(W, pages_per_block)),
            in_specs=[row, *read, *read],
            out_specs=row,
            scratch_shapes=[
                pltpu.VMEM((K, G, H), jnp.float32),
                pltpu.VMEM((K, G, LANES), jnp.float32),
                pltpu.VMEM((K, G, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKGH.shape, q_BKGH.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(
        pages.table_BW,
        pages.length_B,
        q_BKGH,
        *[pages.key_PKZH] * pages_per_block,
        *[pages.value_PKZH] * pages_per_block,
    )


def _kernel(table_ref: Any, length_ref: Any, q_ref: Any, *rest: Any, request: Request, pages_per_block: int) -> None:
    """Online softmax over the pages (Milakov and Gimelshein, 2018)."""
    key_refs, value_refs, (out_ref, *carry) = (
        rest[:pages_per_block],
        rest[pages_per_block : 2 * pages_per_block],
        rest[2 * pages_per_block :],
    )
    sums_ref, top_ref, total_ref = carry
    block, length = pl.program_id(1), length_ref[pl.program_id(0)]
    K, Z, _ = key_refs[0].shape
    tokens = pages_per_block * Z

    @pl.when(block == 0)
    def _begin() -> None:
        sums_ref[...], total_ref[...] = jnp.zeros_like(sums_ref), jnp.zeros_like(total_ref)
        top_ref[...] = jnp.full_like(top_ref, LOWEST)

    first, last = _visible_pages(length, request, Z)

    @pl.when((length > 0) & (block * pages_per_block <= last) & ((block + 1) * pages_per_block > first))
    def _add_block() -> None:
        is_visible_1T = _is_visible(
            block * tokens + jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1), length, request
        )
        is_visible_T1 = _is_visible(
            block * tokens + jax.lax.broadcasted_iota(jnp.int32, (tokens, 1), 0), length, request
        )
        for k in range(K):
            key_TH, value_TH = (jnp.concatenate([ref[k] for ref in refs]) for refs in (key_refs, value_refs))
            logits_GT = jax.lax.dot_general(
                q_ref[k], key_TH, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            logits_GT = jnp.where(is_visible_1T, _capped(logits_GT, request), LOWEST)
            top_G1 = top_ref[k][:, :1]
            new_G1 = jnp.maximum(top_G1, jnp.max(logits_GT, axis=1, keepdims=True))
            weights_GT = jnp.where(is_visible_1T, jnp.exp(logits_GT - new_G1), 0.0)
            rescale_G1 = jnp.exp(top_G1 - new_G1)
            # A non-finite value left behind by another sequence would pass through a weight of zero.
            value_TH = jnp.where(is_visible_T1, value_TH.astype(jnp.float32), 0.0).astype(value_TH.dtype)
            new_GH = jnp.dot(weights_GT.astype(value_TH.dtype), value_TH, preferred_element_type=jnp.float32)
            total_G1 = total_ref[k][:, :1] * rescale_G1 + jnp.sum(weights_GT, axis=1, keepdims=True)
            sums_ref[k] = sums_ref[k] * rescale_G1 + new_GH
            top_ref[k] = jnp.broadcast_to(new_G1, top_ref.shape[1:])
            total_ref[k] = jnp.broadcast_to(total_G1, total_ref.shape[1:])

    @pl.when(block == pl.num_programs(1) - 1)
    def _end() -> None:
        total = total_ref[...][:, :, :1]
        out_ref[...] = (sums_ref[...] / jnp.where(total == 0, 1.0, total)).astype(out_ref.dtype)


def _visible_pages(length: jax.Array, request: Request, Z: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last page of a row that its new token sees; page 0 for an empty row."""
    last = jnp.maximum(length - 1, 0)
    first = jnp.int32(0) if request.window is None else jnp.maximum(last - request.window + 1, 0)
    return jax.lax.div(first, Z), jax.lax.div(last, Z)


def _is_visible(position: jax.Array, length: jax.Array, request: Request) -> jax.Array:
    is_visible = position < length
    return is_visible if request.window is None else is_visible & (position >= length - request.window)


def _capped(logits: jax.Array, request: Request) -> jax.Array:
    scaled = logits * request.scale
    return scaled if request.softcap is None else request.softcap * jnp.tanh(scaled / request.softcap)


def _rotate(x_BNH: jax.Array, rope_factors: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos_BNH, sin_BNH = (turn[:, None] for turn in rope_factors)
    swapped = jnp.roll(x_BNH, x_BNH.shape[-1] // 2, axis=-1)
    return (x_BNH.astype(jnp.float32) * cos_BNH + swapped.astype(jnp.float32) * sin_BNH).astype(x_BNH.dtype)
