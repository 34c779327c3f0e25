"""The kernel for GPUs: a program writes the new key and value of one row and head and reads the pages before them, or a
part of the pages where the row is long.

In Pallas for Triton, which the JAX versions of this project all have, though it is on its way out. Letters as in the
package, M parts of a row.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.attention.request import Request
from maxhydra.kernels.paged_attention.pages import Pages

# Rows and heads up to which processors are left over, and tokens of a row that a program reads all at once where rows
# are few, and where they are many. On an H200, 8 heads of 64: one row of 200 tokens 4.3 us, in two blocks 5.5; 64 rows
# of 110 tokens 9.1 us, in blocks of 32 11.6.
FEW, AT_ONCE, MANY_AT_ONCE = 128, 256, 128
# Tokens that a program reads at a time of longer rows, and those of a part of a row that is cut. 64 rows of 200 tokens:
# 16.5 us, with blocks of 64 20.4, with more on the way 17.7, in parts 19 and more.
FEW_BLOCK, BLOCK, PART = 64, 32, 512
# The matrix unit takes no fewer rows.
LEAST_ROWS = 16
# Sums of values, the largest logit that they are relative to, and the sum of weights.
SoFar = tuple[jax.Array, jax.Array, jax.Array]
LOG2_E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)


class Tile(NamedTuple):
    """What a program does at a time."""

    pages: int
    parts: int
    """Programs that share a row."""
    warps: int
    stages: int


def tile(heads: int, W: int, Z: int) -> Tile:
    """For so many heads of all rows, and W pages of Z tokens a row."""
    tokens, widest, is_few = W * Z, 1 << (W.bit_length() - 1), heads <= FEW
    if tokens <= (AT_ONCE if is_few else MANY_AT_ONCE):
        return Tile(1 << (W - 1).bit_length(), 1, warps=8 if is_few else 4, stages=1)
    pages = min(max((FEW_BLOCK if is_few else BLOCK) // Z, 1), widest)
    parts = FEW // heads if is_few else tokens // PART
    return Tile(pages, max(1, min(pl.cdiv(W, pages), parts)), warps=8 if is_few else 2, stages=1 if is_few else 5)


def attention(
    heads_BMH: jax.Array,
    turns: tuple[jax.Array, jax.Array] | None,
    pages: Pages,
    request: Request,
    *,
    interpret: bool = False,
    by: Tile | None = None,
) -> tuple[jax.Array, Pages]:
    B, M, H = heads_BMH.shape
    P, K, Z, _ = pages.key_PKZH.shape
    N = M - 2 * K
    G = N // K
    W = pages.table_BW.shape[1]
    by = by or tile(B * K, W, Z)
    at_a_time, parts = by.pages, by.parts
    blocks = pl.cdiv(W, at_a_time)

    queries = pl.BlockSpec((None, G, H), lambda b, k, m: (b, k, 0))
    new_key = pl.BlockSpec((None, None, H), lambda b, k, m: (b, N + k, 0))
    new_value = pl.BlockSpec((None, None, H), lambda b, k, m: (b, N + K + k, 0))
    turn = pl.BlockSpec((None, H), lambda b, k, m: (b, 0))
    of_pages = pl.BlockSpec((P, None, Z, H), lambda b, k, m: (0, k, 0, 0))
    row, one = pl.BlockSpec((None, W), lambda b, k, m: (b, 0)), pl.BlockSpec((None,), lambda b, k, m: (b,))
    part = pl.BlockSpec((None, None, None, G, H), lambda b, k, m: (b, k, m, 0, 0))
    size = pl.BlockSpec((None, None, None, G), lambda b, k, m: (b, k, m, 0))
    stored = jax.ShapeDtypeStruct(pages.key_PKZH.shape, pages.key_PKZH.dtype)
    wide = jax.ShapeDtypeStruct((B, K, parts, G), jnp.float32)
    key_PKZH, value_PKZH, out_BKMGH, top_BKMG, total_BKMG = pl.pallas_call(
        partial(_kernel, request=request, at_a_time=at_a_time, each=pl.cdiv(blocks, parts)),
        grid=(B, K, parts),
        in_specs=[of_pages, of_pages, queries, new_key, new_value, row, one, *([] if turns is None else [turn, turn])],
        out_specs=[of_pages, of_pages, part, size, size],
        out_shape=[
            stored,
            stored,
            jax.ShapeDtypeStruct((B, K, parts, G, H), heads_BMH.dtype if parts == 1 else jnp.float32),
            wide,
            wide,
        ],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=by.warps, num_stages=by.stages),
        interpret=interpret,
        name="paged_attention",
    )(pages.key_PKZH, pages.value_PKZH, heads_BMH, heads_BMH, heads_BMH, pages.table_BW, pages.length_B, *(turns or ()))
    pages = pages._replace(key_PKZH=key_PKZH, value_PKZH=value_PKZH)
    if parts == 1:
        return out_BKMGH.reshape(B, N, H), pages
    weight_BKMG = total_BKMG * jnp.exp2(top_BKMG - jnp.max(top_BKMG, axis=2, keepdims=True))
    share_BKMG = weight_BKMG / _nonzero(jnp.sum(weight_BKMG, axis=2, keepdims=True))
    out_BKGH = jnp.sum(out_BKMGH * share_BKMG[..., None], axis=2)
    return out_BKGH.reshape(B, N, H).astype(heads_BMH.dtype), pages


def _kernel(
    key_ref: Any,
    value_ref: Any,
    q_ref: Any,
    new_key_ref: Any,
    new_value_ref: Any,
    table_ref: Any,
    length_ref: Any,
    *rest: Any,
    request: Request,
    at_a_time: int,
    each: int,
) -> None:
    """The softmax is taken as the pages come (Milakov and Gimelshein, 2018): the sums so far, the largest logit they
    are relative to, and the sum of weights. The new token is not read back from where it is written."""
    *turn_refs, key_out_ref, value_out_ref, out_ref, top_ref, total_ref = rest
    G, H = q_ref.shape
    Z = key_ref.shape[1]
    rows, tokens = max(LEAST_ROWS, 1 << (G - 1).bit_length()), at_a_time * Z
    is_head, heads = jnp.arange(rows) < G, pl.ds(0, rows)
    q = plt.load(q_ref.at[heads, :], mask=is_head[:, None], other=0.0)
    new_key, new_value = new_key_ref[...], new_value_ref[...]
    if turn_refs:
        across, down = (jnp.arange(H) + H // 2) % H, jnp.arange(rows)
        exchanged = plt.load(q_ref.at[down[:, None], across[None, :]], mask=is_head[:, None], other=0.0)
        q, new_key = _turned(q, exchanged, turn_refs), _turned(new_key, new_key_ref[across], turn_refs)
    before = length_ref[...] - 1

    def read(block: jax.Array, so_far: SoFar) -> SoFar:
        slots = block * at_a_time + jnp.arange(at_a_time)
        found = plt.load(table_ref.at[pl.ds(block * at_a_time, at_a_time)], mask=slots < table_ref.shape[0], other=0)
        place = block * tokens + jnp.arange(tokens)
        is_seen = place < before
        if request.window is not None:
            is_seen &= place > before - request.window
        key = key_ref[found].reshape(tokens, H)
        value = _written(value_ref, found, (place < before).reshape(at_a_time, Z, 1)).reshape(tokens, H)
        logits = _capped(jnp.dot(q, key.T, preferred_element_type=jnp.float32), request)
        return _taken_in(so_far, logits, is_seen, value)

    own = jnp.sum(q.astype(jnp.float32) * new_key.astype(jnp.float32)[None, :], axis=1)
    is_own = (before >= 0) & (pl.program_id(2) == 0)
    sums = jnp.where(is_own, jnp.broadcast_to(new_value.astype(jnp.float32)[None, :], (rows, H)), 0.0)
    top = jnp.where(is_own, _capped(own, request), LOWEST)
    total = jnp.where(is_own, jnp.ones((rows,), jnp.float32), 0.0)
    page, slot = table_ref[jnp.maximum(before, 0) // Z], jnp.maximum(before, 0) % Z
    everything = jnp.full((H,), is_own)
    plt.store(key_out_ref.at[page, slot, :], new_key, mask=everything)
    plt.store(value_out_ref.at[page, slot, :], new_value, mask=everything)

    first = pl.program_id(2) * each
    last = jnp.minimum(first + each, pl.cdiv(before, tokens))
    if request.window is not None:
        first = jnp.maximum(first, jnp.maximum(before - request.window + 1, 0) // tokens)
    sums, top, total = jax.lax.fori_loop(first, last, read, (sums, top, total))
    plt.store(out_ref.at[heads, :], (sums / _nonzero(total)[:, None]).astype(out_ref.dtype), mask=is_head[:, None])
    plt.store(top_ref.at[heads], top, mask=is_head)
    plt.store(total_ref.at[heads], total, mask=is_head)


def _written(value_ref: Any, found: jax.Array, is_written: jax.Array) -> jax.Array:
    """Values of pages, zeros where none was written: a number that is not finite, left behind by another sequence,
    would get through a weight of zero."""
    shape = (*is_written.shape[:2], value_ref.shape[2])
    axes = found[:, None, None], jnp.arange(shape[1])[None, :, None], jnp.arange(shape[2])[None, None, :]
    at = tuple(jnp.broadcast_to(axis, shape) for axis in axes)
    return plt.load(value_ref.at[at], mask=jnp.broadcast_to(is_written, shape), other=0.0)


def _capped(logits: jax.Array, request: Request) -> jax.Array:
    """Powers of two, which the processors take at once; other powers take them several instructions more."""
    if request.softcap is None:
        return logits * (request.scale * LOG2_E)
    return (request.softcap * LOG2_E) * jnp.tanh(logits * (request.scale / request.softcap))


def _taken_in(so_far: SoFar, logits: jax.Array, is_seen: jax.Array, value: jax.Array) -> SoFar:
    """The sums with some more tokens: those before are scaled to the largest logit of all."""
    sums, top, total = so_far
    logits = jnp.where(is_seen[None, :], logits, LOWEST)
    new_top = jnp.maximum(top, logits.max(axis=1))
    weights = jnp.where(is_seen[None, :], jnp.exp2(logits - new_top[:, None]), 0.0)
    kept = jnp.exp2(top - new_top)
    added = jnp.dot(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return sums * kept[:, None] + added, new_top, total * kept + weights.sum(axis=1)


def _turned(x: jax.Array, exchanged: jax.Array, turn_refs: Sequence[Any]) -> jax.Array:
    wide = x.astype(jnp.float32) * turn_refs[0][...] + exchanged.astype(jnp.float32) * turn_refs[1][...]
    return wide.astype(x.dtype)


def _nonzero(total: jax.Array) -> jax.Array:
    """What to divide by: a row without tokens gives zeros."""
    return jnp.where(total == 0, 1, total)
