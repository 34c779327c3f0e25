"""The kernel for GPUs: a program writes the new key and value of one row and head, and attends over earlier tokens.

Long rows are split over several programs (split-KV). In Pallas for Triton, which all supported JAX versions have,
though it is being phased out. Shape letters as in the package, M splits of a row, T tokens of a block.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.attention.spec import Request
from maxhydra.kernels.paged_attention.pages import Pages
from maxhydra.kernels.ptx import THREADS_PER_WARP, L2Prefetch

# The tensor cores need at least this many rows, which are queries or tokens.
LEAST_ROWS = 16
# Number of programs up to which multiprocessors are idle, and number that keeps all of them busy.
FEW, ENOUGH = 128, 512
# Tokens that a program reads at once if programs are few, for keys of KEY_BYTES bytes; fewer for larger keys.
AT_ONCE, KEY_BYTES = 256, 128
# Tokens of a row up to which a program of one warp, which starts and ends sooner, is faster than one of two.
SHORT = 512
LOG2_E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)


class Tile(NamedTuple):
    """Work of a program per step, and launch parameters."""

    tokens: int
    """Tokens of a block."""
    parts: int
    """Programs that share a row (split-KV)."""
    warps: int
    stages: int
    """Prefetch depth: one block each, or one per two stages if the page table is read for every block."""
    has_table: bool
    """Whether the whole page table is kept in registers. A block is then at most one page."""


def choose_tile(heads: int, tokens: int, page: int, size: int) -> Tile:
    """Choose the tile from heads of all rows, tokens of a row and of a page, and bytes of a key.

    Measured on an H200 with 8 key heads of 64 in bfloat16, in us. 64 rows of 200 tokens: 11.2 with blocks of 16, one
    warp and three blocks in flight (two 11.9, four 11.4; blocks of 32: 12.5); 11.9 with blocks of 32, two warps and two
    in flight (three, four or one in flight, 4 warps, and blocks of 64 or 128 are slower on another card); with 300
    tokens 14.4 and 14.9. With 96 tokens, on that card, 7.6 with blocks of 32 (all at once 8.3); with 2,000 tokens 68.6
    (four splits 75.1). One row of 200 tokens: 4.0 all at once (with 8 warps 4.1), 4.5 in four splits, of which 2.0 is
    their reduction; 8 rows 5.0 (blocks of 128: 5.5). Four rows of 4,000 tokens: 15.3 in 16 splits of such blocks (of
    128: 20.8), 17.2 in 32.
    """
    unit, parts = max(size // KEY_BYTES, 1), 1
    if heads <= FEW and tokens * unit > AT_ONCE:
        parts = max(min(tokens // 64, FEW // heads), min(tokens // 256, ENOUGH // heads))
    each = pl.cdiv(tokens, parts)
    if heads * parts <= FEW and each * unit <= AT_ONCE:
        return Tile(max(1 << (each - 1).bit_length(), LEAST_ROWS), parts, warps=4, stages=1, has_table=False)
    if parts == unit == 1 and tokens <= SHORT:
        has_table = page >= LEAST_ROWS
        return Tile(LEAST_ROWS, parts, warps=1, stages=5 if has_table else 7, has_table=has_table)
    return Tile(max(32 // unit, LEAST_ROWS), parts, warps=2, stages=5, has_table=False)


def attention(
    heads_SBMH: jax.Array,
    rope_factors: tuple[jax.Array, jax.Array] | None,
    pages: Pages,
    request: Request,
    *,
    then: jax.Array | None = None,
    interpret: bool = False,
    tile: Tile | None = None,
) -> tuple[jax.Array, Pages]:
    S, B, M, H = heads_SBMH.shape
    P, K, Z, _ = pages.key_PKZH.shape
    N, dtype = M - 2 * K, pages.key_PKZH.dtype
    G, W = N // K, pages.table_BW.shape[1]
    tile = tile or choose_tile(B * K, W * Z, Z, H * dtype.itemsize)
    parts = tile.parts
    is_many = parts == 1 and B * K > FEW and tile.warps * THREADS_PER_WARP <= H
    prefetch = L2Prefetch.of(then, programs=B * K, warps=tile.warps) if then is not None and is_many else None

    queries = pl.BlockSpec((S, None, G, H), lambda b, k, m: (0, b, k, 0))
    new_key = pl.BlockSpec((S, None, None, H), lambda b, k, m: (0, b, N + k, 0))
    new_value = pl.BlockSpec((S, None, None, H), lambda b, k, m: (0, b, N + K + k, 0))
    turn = pl.BlockSpec((None, H), lambda b, k, m: (b, 0))
    pages_spec = pl.BlockSpec((P, None, Z, H), lambda b, k, m: (0, k, 0, 0))
    row, scalar = pl.BlockSpec((None, W), lambda b, k, m: (b, 0)), pl.BlockSpec((None,), lambda b, k, m: (b,))
    part = pl.BlockSpec((None, None, None, G, H), lambda b, k, m: (b, k, m, 0, 0))
    size = pl.BlockSpec((None, None, None, G), lambda b, k, m: (b, k, m, 0))
    stored = jax.ShapeDtypeStruct(pages.key_PKZH.shape, pages.key_PKZH.dtype)
    wide = jax.ShapeDtypeStruct((B, K, parts, G), jnp.float32)
    key_PKZH, value_PKZH, out_BKMGH, *sizes = pl.pallas_call(
        partial(
            _kernel, request=request, tile=tile, each=pl.cdiv(pl.cdiv(W * Z, tile.tokens), parts), prefetch=prefetch
        ),
        grid=(B, K, parts),
        in_specs=[
            *(pages_spec, pages_spec, queries, new_key, new_value, row, scalar),
            *([] if rope_factors is None else [turn, turn]),
            *([] if prefetch is None else [prefetch.spec]),
        ],
        out_specs=[pages_spec, pages_spec, part, *([size, size] if parts > 1 else [])],
        out_shape=[
            stored,
            stored,
            jax.ShapeDtypeStruct((B, K, parts, G, H), dtype if parts == 1 else jnp.float32),
            *([wide, wide] if parts > 1 else []),
        ],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_attention",
    )(
        *(pages.key_PKZH, pages.value_PKZH, heads_SBMH, heads_SBMH, heads_SBMH, pages.table_BW, pages.length_B),
        *(rope_factors or ()),
        *([] if prefetch is None else [then]),
    )
    pages = pages._replace(key_PKZH=key_PKZH, value_PKZH=value_PKZH)
    if parts == 1:
        return out_BKMGH.reshape(B, N, H), pages
    return _combine_splits(out_BKMGH, *sizes).reshape(B, N, H).astype(dtype), pages


def _combine_splits(out_BKMGH: jax.Array, top_BKMG: jax.Array, total_BKMG: jax.Array) -> jax.Array:
    """[B, K, G, H]: combine the outputs of the splits, weighted by their shares of the softmax denominator."""
    weight_BKMG = total_BKMG * jnp.exp2(top_BKMG - jnp.max(top_BKMG, axis=2, keepdims=True))
    share_BKMG = weight_BKMG / _nonzero(jnp.sum(weight_BKMG, axis=2, keepdims=True))
    return jnp.sum(out_BKMGH * share_BKMG[..., None], axis=2)


class _Softmax(NamedTuple):
    sums: jax.Array
    """Weighted sums of values, [rows, H]."""
    top: jax.Array
    """The largest logit, relative to which the sums are."""
    total: jax.Array
    """Sum of weights."""


class _Tokens(NamedTuple):
    """Keys, values and mask of a block."""

    key: jax.Array
    value: jax.Array
    is_visible: jax.Array


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
    tile: Tile,
    each: int,
    prefetch: L2Prefetch | None,
) -> None:
    """Online softmax over blocks (Milakov and Gimelshein, 2018). `each`: blocks of a split.

    The new token is added last, when no load waits for it, and is not read back from the cache.
    """
    count = len(rest) - (3 if tile.parts == 1 else 5)
    (*rope_refs,), (key_out_ref, value_out_ref, out_ref, *size_refs) = rest[:count], rest[count:]
    prefetch_ref = rope_refs.pop() if prefetch is not None else None
    (_, G, H), T = q_ref.shape, tile.tokens
    rows = max(LEAST_ROWS, 1 << (G - 1).bit_length())
    is_head, heads = jnp.arange(rows) < G, pl.ds(0, rows)
    before, Z = length_ref[...] - 1, key_ref.shape[1]
    table = _load_table(table_ref) if tile.has_table else table_ref
    dtype = key_ref.dtype
    q = _queries(q_ref, rope_refs, rows, dtype)
    new_key, new_value = _rotated(new_key_ref, rope_refs, dtype), _sum_of(new_value_ref, dtype)
    last = jnp.maximum(before, 0)
    page = table_ref[last // Z]

    def read(block: jax.Array, carry: _Softmax) -> _Softmax:
        tokens = _block(key_ref, value_ref, table, block * T, T, before, request)
        return _add_block(carry, q, tokens, request)

    start = pl.program_id(2) * each
    stop = jnp.minimum(start + each, pl.cdiv(before, T))
    if request.window is not None:
        start = jnp.maximum(start, jnp.maximum(before - request.window + 1, 0) // T)
    initial = _Softmax(
        jnp.zeros((rows, H), jnp.float32), jnp.full((rows,), LOWEST / 2, jnp.float32), jnp.zeros((rows,), jnp.float32)
    )
    carry = jax.lax.fori_loop(start, stop, read, initial)
    has_new_token = (before >= 0) & (pl.program_id(2) == 0)
    sums, top, total = _add_new_token(carry, q, new_key, new_value, has_new_token, request)
    for ref, new in ((key_out_ref, new_key), (value_out_ref, new_value)):
        plt.store(ref.at[page, last % Z, :], new, mask=jnp.full((H,), has_new_token))
    if prefetch is not None:
        program = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
        prefetch.issue(prefetch_ref, program, out_ref.at[0, pl.ds(0, prefetch.threads)], after=jnp.max(total))
    out = sums * (1 / _nonzero(total))[:, None]
    plt.store(out_ref.at[heads, :], out.astype(out_ref.dtype), mask=is_head[:, None])
    for ref, value in zip(size_refs, (top, total)[: len(size_refs)], strict=True):
        plt.store(ref.at[heads], value, mask=is_head)


def _block(
    key_ref: Any, value_ref: Any, table: Any, start: jax.Array, T: int, before: jax.Array, request: Request
) -> _Tokens:
    """Load a block of tokens from `start` on, with zeros for masked ones.

    Zeros, because a non-finite value left behind by another sequence would pass through a weight of zero. If the page
    table is in registers, a block is a slice of one page. Otherwise every token has its own address, so that loads
    reach the tensor cores in the order in which they arrive; the table lookup does not wait for the row's length.
    """
    Z, H = key_ref.shape[1:]
    position, shape = start + jnp.arange(T), (T, H)
    is_visible = position < before
    if request.window is not None:
        is_visible &= position > before - request.window
    at: tuple[Any, ...]
    if isinstance(table, jax.Array):
        page = jnp.sum(jnp.where(jnp.arange(table.shape[0]) == start // Z, table, 0))
        at = page, pl.ds(start % Z, T), slice(None)
    else:
        page = plt.load(table.at[jnp.minimum(position // Z, table.shape[0] - 1)])
        axes = page[:, None], (position % Z)[:, None], jnp.arange(H)[None, :]
        at = tuple(jnp.broadcast_to(axis, shape) for axis in axes)
    mask = jnp.broadcast_to(is_visible[:, None], shape)
    key, value = (plt.load(ref.at[at], mask=mask, other=0.0) for ref in (key_ref, value_ref))
    return _Tokens(key, value, is_visible)


def _load_table(table_ref: Any) -> jax.Array:
    """Load the page table into registers together with the queries.

    A page lookup is then one instruction, instead of a load that another load depends on.
    """
    W = table_ref.shape[0]
    return plt.load(table_ref.at[jnp.minimum(jnp.arange(1 << (W - 1).bit_length()), W - 1)])


def _add_block(carry: _Softmax, q: jax.Array, tokens: _Tokens, request: Request) -> _Softmax:
    """Add a block of tokens to the online softmax."""
    sums, top, total = carry
    logits = _capped(jnp.dot(q, tokens.key.T, preferred_element_type=jnp.float32), request)
    logits = jnp.where(tokens.is_visible[None, :], logits, -jnp.inf)
    new_top = jnp.maximum(top, logits.max(axis=1))
    weights = jnp.exp2(logits - new_top[:, None])
    rescale = jnp.exp2(top - new_top)
    new_sums = jnp.dot(weights.astype(tokens.value.dtype), tokens.value, preferred_element_type=jnp.float32)
    return _Softmax(sums * rescale[:, None] + new_sums, new_top, total * rescale + weights.sum(axis=1))


def _capped(logits: jax.Array, request: Request) -> jax.Array:
    """Logits in units of log 2: GPUs compute 2^x in one instruction, other exponentials take several."""
    if request.softcap is None:
        return logits * (request.scale * LOG2_E)
    return (request.softcap * LOG2_E) * jnp.tanh(logits * (request.scale / request.softcap))


def _add_new_token(
    carry: _Softmax, q: jax.Array, new_key: jax.Array, new_value: jax.Array, has_new_token: jax.Array, request: Request
) -> _Softmax:
    """Add the new token to the online softmax, if it belongs to this program."""
    sums, top, total = carry
    logits = _capped(jnp.sum(q.astype(jnp.float32) * new_key.astype(jnp.float32)[None, :], axis=1), request)
    logits = jnp.where(has_new_token, logits, -jnp.inf)
    new_top = jnp.maximum(top, logits)
    weights, rescale = jnp.exp2(logits - new_top), jnp.exp2(top - new_top)
    new_sums = weights[:, None] * new_value.astype(jnp.float32)[None, :]
    return _Softmax(sums * rescale[:, None] + new_sums, new_top, total * rescale + weights)


def _queries(q_ref: Any, rope_refs: Sequence[Any], rows: int, dtype: jnp.dtype) -> jax.Array:
    """Load the queries, padded to `rows`, and apply the rotary embedding.

    Cosines and sines are loaded for every row, which is faster than exchanging them between threads.
    """
    parts, G, H = q_ref.shape
    down, across, shape = jnp.arange(rows)[:, None], jnp.arange(H)[None, :], (rows, H)

    def read(ref: Any, *axes: jax.Array) -> jax.Array:
        at = tuple(jnp.broadcast_to(axis, shape) for axis in axes)
        return plt.load(ref.at[at], mask=jnp.broadcast_to(down < G, shape), other=0.0)

    def heads(across: jax.Array) -> jax.Array:
        return _sum_parts((read(q_ref, jnp.full((1, 1), part), down, across) for part in range(parts)), dtype)

    q = heads(across)
    if not rope_refs:
        return q
    swapped = heads((across + H // 2) % H)
    cos, sin = (read(ref, across) for ref in rope_refs)
    return (q.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin).astype(dtype)


def _rotated(new_key_ref: Any, rope_refs: Sequence[Any], dtype: jnp.dtype) -> jax.Array:
    """The new key with its rotary embedding."""
    key, H = _sum_of(new_key_ref, dtype), new_key_ref.shape[1]
    if not rope_refs:
        return key
    swapped = _sum_of(new_key_ref, dtype, (jnp.arange(H) + H // 2) % H)
    cos, sin = (ref[...] for ref in rope_refs)
    return (key.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin).astype(dtype)


def _sum_of(ref: Any, dtype: jnp.dtype, across: Any = slice(None)) -> jax.Array:
    return _sum_parts((ref[part, across] for part in range(ref.shape[0])), dtype)


def _sum_parts(parts: Iterable[jax.Array], dtype: jnp.dtype) -> jax.Array:
    return reduce(jnp.add, (part.astype(jnp.float32) for part in parts)).astype(dtype)


def _nonzero(total: jax.Array) -> jax.Array:
    """A divisor: a row without tokens gives zeros."""
    return jnp.where(total == 0, 1, total)
