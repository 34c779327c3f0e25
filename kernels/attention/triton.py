"""Flash attention (Dao, 2023) for what cuDNN has not: soft-caps, sinks, chunks and large heads. For GPUs, in Pallas for
Triton.

Logits are in units of log 2, since the processors have 2^x and no e^x. A block of keys that every query of a block
sees whole takes no mask; blocks that no query sees are not read. The backward pass makes the weights again, once for
the queries and once for keys and values; a program of the latter goes over all query heads that share its key head.

Shapes as in request.py; C queries and D keys of a block.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.attention.blocks import (
    LOG2E,
    LOWEST,
    Inputs,
    Rows,
    key_ranges,
    over,
    query_ranges,
    seen,
)
from maxhydra.kernels.attention.spec import KEPT, Request, TokenInfo
from maxhydra.kernels.tiles import Sizes, candidates, resized

# Blocks are cut to what divides a length, and smaller ones than this waste the matrix unit.
LENGTH_MULTIPLE = 64


class Block(NamedTuple):
    """What a program does at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


class Blocks(NamedTuple):
    """The blocks of the three kernels."""

    forward: Block
    for_queries: Block
    for_keys: Block


# By head size: the fastest of those measured on an H200 with a soft-cap.
BLOCKS = {
    64: Blocks(Block(64, 64, 4, 3), Block(64, 64, 4, 3), Block(128, 64, 4, 2)),
    128: Blocks(Block(128, 64, 4, 2), Block(128, 64, 8, 3), Block(64, 64, 4, 2)),
    256: Blocks(Block(128, 64, 8, 2), Block(128, 32, 8, 2), Block(64, 32, 4, 2)),
}
# Worth a trial for other masks, lengths and cards; small blocks where heads are large, for shared memory holds them.
TRIED = (Block(64, 64, 4, 3), Block(128, 64, 4, 2), Block(128, 64, 8, 3), Block(64, 128, 4, 2), Block(128, 128, 8, 2))
TRIED_LARGE = (Block(64, 64, 4, 2), Block(64, 32, 4, 2), Block(128, 32, 8, 2))
LARGE = 256


@dataclasses.dataclass(frozen=True)
class How:
    """What is known when the kernels are compiled."""

    request: Request
    blocks: Blocks
    interpret: bool


def cut(length: int) -> dict[str, int]:
    """What the sizes of the blocks must divide, by name."""
    return {f"{kernel}.{side}": length for kernel in Blocks._fields for side in ("queries", "keys")}


def tried(head_dim: int, length: int) -> dict[str, list[dict[str, int]]]:
    """Sizes to try for each kernel; none for heads that it does not take."""
    if head_dim > LARGE:
        return {}
    blocks = TRIED_LARGE if width(head_dim) == LARGE else TRIED
    return candidates(dict.fromkeys(Blocks._fields, blocks), BLOCKS[width(head_dim)], cut(length))


def width(head_dim: int) -> int:
    """What heads of this size are filled up to."""
    return min(size for size in BLOCKS if size >= head_dim)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    tokens: TokenInfo,
    sinks_N: jax.Array | None,
    *,
    blocks: Blocks | None = None,
    sizes: Sizes = (),
    interpret: bool = False,
) -> jax.Array:
    """Heads of other sizes than those of BLOCKS are filled up with zeros, which add nothing to logits and values."""
    wide = width(max(q_BTNH.shape[3], v_BSKH.shape[3]))
    how = How(request, resized(blocks or BLOCKS[wide], sizes), interpret)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide - x.shape[3]))) for x in (q_BTNH, k_BSKH, v_BSKH))
    out_BTNH = _attend(how, Inputs(q, k, v, sinks_N, tokens.q_segments_BT, tokens.kv_segments_BS))
    return out_BTNH[..., : v_BSKH.shape[3]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, inputs: Inputs) -> jax.Array:
    return _forward(how, inputs)[0]


def _forward(how: How, inputs: Inputs) -> tuple[jax.Array, tuple[Inputs, jax.Array, jax.Array]]:
    """The values, and for the backward pass also log2 of the sum of each row's exponentials."""
    q_BTNH = inputs.q_BTNH
    B, T, N, _ = q_BTNH.shape
    block = how.blocks.forward
    sizes = _Sizes.of(inputs, block)
    specs = sizes.by_queries
    out_BTNH, total_BNT = pl.pallas_call(
        partial(_forward_kernel, how=how),
        grid=(T // sizes.C, N, B),
        in_specs=[specs.inputs(inputs)],
        out_specs=[specs.q, specs.row],
        out_shape=[
            jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=how.interpret,
        name="attention_forward",
    )(inputs)
    out_BTNH, total_BNT = checkpoint_name((out_BTNH, total_BNT), KEPT)
    return out_BTNH, (inputs, out_BTNH, total_BNT)


def _backward(how: How, kept: tuple[Inputs, jax.Array, jax.Array], d_out_BTNH: jax.Array) -> tuple[Inputs]:
    inputs, out_BTNH, total_BNT = kept
    rows = Rows.of(out_BTNH, total_BNT, d_out_BTNH)
    return (Inputs(*gradients(how, inputs, rows), rows.d_sinks(inputs), None, None),)


def gradients(how: How, inputs: Inputs, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of queries, keys and values."""
    q_BTNH, k_BSKH = inputs.q_BTNH, inputs.k_BSKH
    (B, T, N, _), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape

    block = how.blocks.for_queries
    sizes = _Sizes.of(inputs, block)
    specs = sizes.by_queries
    d_q_BTNH = pl.pallas_call(
        partial(_queries_kernel, how=how),
        grid=(T // sizes.C, N, B),
        in_specs=[specs.inputs(inputs), Rows(specs.q, specs.row, specs.row)],
        out_specs=specs.q,
        out_shape=jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype),
        compiler_params=plt.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=how.interpret,
        name="attention_backward_queries",
    )(inputs, rows)

    block = how.blocks.for_keys
    sizes = _Sizes.of(inputs, block)
    specs = sizes.by_keys
    of_keys = jax.ShapeDtypeStruct(k_BSKH.shape, k_BSKH.dtype)
    d_k_BSKH, d_v_BSKH = pl.pallas_call(
        partial(_keys_kernel, how=how),
        grid=(S // sizes.D, K, B),
        in_specs=[specs.inputs(inputs), Rows(specs.q, specs.row, specs.row)],
        out_specs=[specs.kv, specs.kv],
        out_shape=[of_keys, of_keys],
        compiler_params=plt.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=how.interpret,
        name="attention_backward_keys",
    )(inputs, rows)
    return d_q_BTNH, d_k_BSKH, d_v_BSKH


_attend.defvjp(_forward, _backward)


class _Specs(NamedTuple):
    """What a program sees of each array."""

    q: pl.BlockSpec
    kv: pl.BlockSpec
    row: pl.BlockSpec
    sinks: pl.BlockSpec
    q_segments: pl.BlockSpec
    kv_segments: pl.BlockSpec

    def inputs(self, inputs: Inputs) -> Any:
        specs: Any = (self.q, self.kv, self.kv, self.sinks, self.q_segments, self.kv_segments)
        return Inputs._make(None if array is None else spec for array, spec in zip(inputs, specs, strict=True))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    T: int
    S: int
    G: int
    H: int
    C: int
    D: int

    @classmethod
    def of(cls, inputs: Inputs, block: Block) -> "_Sizes":
        (_, T, N, H), (_, S, K, _) = inputs.q_BTNH.shape, inputs.k_BSKH.shape
        return cls(T, S, N // K, H, math.gcd(block.queries, T), math.gcd(block.keys, S))

    @property
    def by_queries(self) -> _Specs:
        """A block of queries of one head, the last first, as it takes longest; all keys."""
        last, G = self.T // self.C - 1, self.G
        return _Specs(
            q=pl.BlockSpec((None, self.C, None, self.H), lambda i, n, b: (b, last - i, n, 0)),
            kv=pl.BlockSpec((None, self.S, None, self.H), lambda i, n, b: (b, 0, jax.lax.div(n, G), 0)),
            row=pl.BlockSpec((None, None, self.C), lambda i, n, b: (b, n, last - i)),
            sinks=pl.BlockSpec((None,), lambda i, n, b: (n,)),
            q_segments=pl.BlockSpec((None, self.C), lambda i, n, b: (b, last - i)),
            kv_segments=pl.BlockSpec((None, self.S), lambda i, n, b: (b, 0)),
        )

    @property
    def by_keys(self) -> _Specs:
        """A block of keys of one head; all queries of the heads that share it."""
        return _Specs(
            q=pl.BlockSpec((None, self.T, self.G, self.H), lambda j, k, b: (b, 0, k, 0)),
            kv=pl.BlockSpec((None, self.D, None, self.H), lambda j, k, b: (b, j, k, 0)),
            row=pl.BlockSpec((None, self.G, self.T), lambda j, k, b: (b, k, 0)),
            sinks=pl.BlockSpec((self.G,), lambda j, k, b: (k,)),
            q_segments=pl.BlockSpec((None, self.T), lambda j, k, b: (b, 0)),
            kv_segments=pl.BlockSpec((None, self.D), lambda j, k, b: (b, j)),
        )


def _forward_kernel(refs: Inputs, out_ref: Any, total_ref: Any, *, how: How) -> None:
    """The softmax is taken as the keys come (Milakov and Gimelshein, 2018); a sink is a key whose value is zero."""
    (C, H), S = refs.q_BTNH.shape, refs.k_BSKH.shape[0]
    D = math.gcd(how.blocks.forward.keys, S)
    start = (pl.num_programs(0) - 1 - pl.program_id(0)) * C
    q_CH = refs.q_BTNH[...]
    of_queries = None if refs.q_segments_BT is None else refs.q_segments_BT[...]

    def step(j: jax.Array, so_far: Any, *, masked: bool) -> Any:
        sums_CH, top_C, total_C = so_far
        keys = pl.ds(j * D, D)
        logits_CD = _logits(q_CH, refs.k_BSKH[keys, :], how.request)[0]
        if masked:
            of_keys = None if refs.kv_segments_BS is None else refs.kv_segments_BS[keys]
            is_seen = _seen(how.request, (start, j * D), (C, D), of_queries, of_keys)
            logits_CD = jnp.where(is_seen, logits_CD, LOWEST)
        new_top_C = jnp.maximum(top_C, logits_CD.max(axis=1))
        weights_CD = jnp.exp2(logits_CD - new_top_C[:, None])
        kept_C = jnp.exp2(top_C - new_top_C)
        v_DH = refs.v_BSKH[keys, :]
        added_CH = jnp.dot(weights_CD.astype(v_DH.dtype), v_DH, preferred_element_type=jnp.float32)
        return sums_CH * kept_C[:, None] + added_CH, new_top_C, total_C * kept_C + weights_CD.sum(axis=1)

    top_C, total_C = jnp.full((C,), LOWEST, jnp.float32), jnp.zeros((C,), jnp.float32)
    if refs.sinks_N is not None:
        top_C, total_C = jnp.full((C,), refs.sinks_N[...].astype(jnp.float32) * LOG2E), total_C + 1
    ranges = key_ranges(how.request, start, C=C, D=D, S=S, is_tagged=of_queries is not None)
    sums_CH, top_C, total_C = over(ranges, step, (jnp.zeros((C, H), jnp.float32), top_C, total_C))
    # A query that sees nothing has summed up what is hidden from it.
    share_C = jnp.where(top_C == LOWEST, 0.0, 1 / total_C)
    out_ref[...] = (sums_CH * share_C[:, None]).astype(out_ref.dtype)
    total_ref[...] = top_C + jnp.log2(total_C)


def _queries_kernel(refs: Inputs, rows: Any, d_q_ref: Any, *, how: How) -> None:
    (C, H), S = refs.q_BTNH.shape, refs.k_BSKH.shape[0]
    D = math.gcd(how.blocks.for_queries.keys, S)
    start = (pl.num_programs(0) - 1 - pl.program_id(0)) * C
    q_CH, (d_out_CH, total_C, mean_C) = refs.q_BTNH[...], (ref[...] for ref in rows)
    of_queries = None if refs.q_segments_BT is None else refs.q_segments_BT[...]

    def step(j: jax.Array, d_q_CH: jax.Array, *, masked: bool) -> jax.Array:
        keys = pl.ds(j * D, D)
        k_DH = refs.k_BSKH[keys, :]
        logits_CD, slope_CD = _logits(q_CH, k_DH, how.request)
        weights_CD = jnp.exp2(logits_CD - total_C[:, None])
        if masked:
            of_keys = None if refs.kv_segments_BS is None else refs.kv_segments_BS[keys]
            is_seen = _seen(how.request, (start, j * D), (C, D), of_queries, of_keys)
            weights_CD = jnp.where(is_seen, weights_CD, 0.0)
        d_weights_CD = jnp.dot(d_out_CH, refs.v_BSKH[keys, :].T, preferred_element_type=jnp.float32)
        d_logits_CD = weights_CD * (d_weights_CD - mean_C[:, None]) * slope_CD
        return d_q_CH + jnp.dot(d_logits_CD.astype(k_DH.dtype), k_DH, preferred_element_type=jnp.float32)

    ranges = key_ranges(how.request, start, C=C, D=D, S=S, is_tagged=of_queries is not None)
    d_q_CH = over(ranges, step, jnp.zeros((C, H), jnp.float32))
    d_q_ref[...] = (d_q_CH * how.request.scale).astype(d_q_ref.dtype)


def _keys_kernel(refs: Inputs, rows: Any, d_k_ref: Any, d_v_ref: Any, *, how: How) -> None:
    """Everything is turned, keys by queries, so that the weights are a left operand, which may come from registers."""
    (D, H), (T, G, _) = refs.k_BSKH.shape, refs.q_BTNH.shape
    C = math.gcd(how.blocks.for_keys.queries, T)
    start = pl.program_id(0) * D
    k_DH, v_DH = refs.k_BSKH[...], refs.v_BSKH[...]
    d_out_ref, total_ref, mean_ref = rows
    of_keys = None if refs.kv_segments_BS is None else refs.kv_segments_BS[...]

    def step(i: jax.Array, so_far: Any, *, masked: bool, g: jax.Array) -> Any:
        d_k_DH, d_v_DH = so_far
        queries = pl.ds(i * C, C)
        q_CH, d_out_CH = refs.q_BTNH[queries, g, :], d_out_ref[queries, g, :]
        logits_DC, slope_DC = _logits(k_DH, q_CH, how.request)
        weights_DC = jnp.exp2(logits_DC - total_ref[g, queries][None, :])
        if masked:
            of_queries = None if refs.q_segments_BT is None else refs.q_segments_BT[queries]
            is_seen = _seen(how.request, (i * C, start), (C, D), of_queries, of_keys, turned=True)
            weights_DC = jnp.where(is_seen, weights_DC, 0.0)
        d_v_DH += jnp.dot(weights_DC.astype(d_out_CH.dtype), d_out_CH, preferred_element_type=jnp.float32)
        d_weights_DC = jnp.dot(v_DH, d_out_CH.T, preferred_element_type=jnp.float32)
        d_logits_DC = weights_DC * (d_weights_DC - mean_ref[g, queries][None, :]) * slope_DC
        d_k_DH += jnp.dot(d_logits_DC.astype(q_CH.dtype), q_CH, preferred_element_type=jnp.float32)
        return d_k_DH, d_v_DH

    ranges = query_ranges(how.request, start, C=C, D=D, T=T, is_tagged=of_keys is not None)
    zeros = jnp.zeros((D, H), jnp.float32)
    d_k_DH, d_v_DH = jax.lax.fori_loop(0, G, lambda g, so_far: over(ranges, partial(step, g=g), so_far), (zeros, zeros))
    d_k_ref[...] = (d_k_DH * how.request.scale).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v_DH.astype(d_v_ref.dtype)


def _seen(
    request: Request,
    first: tuple[jax.Array, jax.Array],
    shape: tuple[int, int],
    of_queries: jax.Array | None,
    of_keys: jax.Array | None,
    *,
    turned: bool = False,
) -> jax.Array:
    """Which keys of a block the queries of a block see, [C, D], or [D, C] if turned; of each the first token."""
    column, row = (slice(None), None), (None, slice(None))
    of: Any = (row, column) if turned else (column, row)
    q, k = ((start + jnp.arange(size))[at] for start, size, at in zip(first, shape, of, strict=True))
    segments = (None if one is None else one[at] for one, at in zip((of_queries, of_keys), of, strict=True))
    return seen(request, q, k, *segments)


def _logits(a: jax.Array, b: jax.Array, request: Request) -> tuple[jax.Array, jax.Array | float]:
    """Logits of the rows of a and b in units of log 2, and their slope against scale * a b^T in natural ones."""
    product = jnp.dot(a, b.T, preferred_element_type=jnp.float32)
    if request.softcap is None:
        return product * (request.scale * LOG2E), 1.0
    # tanh from 2^x: its error is that of a number near one, so that of the logits is 1e-7 of the cap.
    turned = 1 - 2 / (1 + jnp.exp2(product * (2 * LOG2E * request.scale / request.softcap)))
    return turned * (request.softcap * LOG2E), 1 - turned * turned
