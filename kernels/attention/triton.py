"""Flash attention (Dao, 2023) for GPUs, in Pallas for Triton: soft-caps, sinks, chunks and large heads, which cuDNN
lacks.

Logits are in units of log 2, since GPUs compute 2^x in hardware but not e^x. A block of keys that every query of a
block sees takes no mask; blocks that no query sees are not read. The backward pass recomputes the weights, once for the
queries and once for keys and values; a program of the latter processes all query heads that share its key head.

Shapes as in spec.py; C queries and D keys of a block.
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
    fold_blocks,
    key_ranges,
    query_ranges,
    visible_mask,
)
from maxhydra.kernels.attention.spec import CHECKPOINT_NAME, Request, TokenInfo
from maxhydra.kernels.tiles import Sizes, candidates, override_sizes

# Blocks are reduced to a divisor of the length; smaller ones than this underuse the tensor cores.
LENGTH_MULTIPLE = 64


class Block(NamedTuple):
    """Queries and keys of a step, and launch parameters."""

    queries: int
    keys: int
    warps: int
    stages: int


class Blocks(NamedTuple):
    """Blocks of the three kernels."""

    forward: Block
    for_queries: Block
    for_keys: Block


# By head size: the fastest measured on an H200 with a soft-cap.
BLOCKS = {
    64: Blocks(Block(64, 64, 4, 3), Block(64, 64, 4, 3), Block(128, 64, 4, 2)),
    128: Blocks(Block(128, 64, 4, 2), Block(128, 64, 8, 3), Block(64, 64, 4, 2)),
    256: Blocks(Block(128, 64, 8, 2), Block(128, 32, 8, 2), Block(64, 32, 4, 2)),
}
# Candidates for other masks, lengths and GPUs; large heads need small blocks to fit in shared memory.
CANDIDATE_TILES = (
    Block(64, 64, 4, 3),
    Block(128, 64, 4, 2),
    Block(128, 64, 8, 3),
    Block(64, 128, 4, 2),
    Block(128, 128, 8, 2),
)
CANDIDATE_TILES_LARGE = (Block(64, 64, 4, 2), Block(64, 32, 4, 2), Block(128, 32, 8, 2))
LARGE = 256


@dataclasses.dataclass(frozen=True)
class KernelParams:
    """Static parameters of the kernels."""

    request: Request
    blocks: Blocks
    interpret: bool


def tile_extents(length: int) -> dict[str, int]:
    """The extent that each block size must divide, by name."""
    return {f"{kernel}.{side}": length for kernel in Blocks._fields for side in ("queries", "keys")}


def candidate_tiles(head_dim: int, length: int) -> dict[str, list[dict[str, int]]]:
    """Candidate block sizes for each kernel; empty for unsupported head sizes."""
    if head_dim > LARGE:
        return {}
    blocks = CANDIDATE_TILES_LARGE if width(head_dim) == LARGE else CANDIDATE_TILES
    return candidates(dict.fromkeys(Blocks._fields, blocks), BLOCKS[width(head_dim)], tile_extents(length))


def width(*head_dims: int) -> int:
    """The supported head size to which heads of these sizes are padded."""
    return min(size for size in BLOCKS if size >= max(head_dims))


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
    """Pad heads of sizes other than those of BLOCKS with zeros, which add nothing to logits and values."""
    inputs = Inputs(q_BTNH, k_BSKH, v_BSKH, sinks_N, tokens.q_segments_BT, tokens.kv_segments_BS)
    wide = width(q_BTNH.shape[3], v_BSKH.shape[3])
    params = KernelParams(request, override_sizes(blocks or BLOCKS[wide], sizes), interpret)
    return _attend(params, _padded(inputs, wide))[..., : v_BSKH.shape[3]]


def block_forward(
    request: Request, inputs: Inputs, *, sizes: Sizes = (), interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`BlockKernel.forward`."""
    H, V = inputs.q_BTNH.shape[3], inputs.v_BSKH.shape[3]
    params = KernelParams(request, override_sizes(BLOCKS[width(H, V)], sizes), interpret)
    out_BTNH, total_BNT = _outputs(params, _padded(inputs, width(H, V)))
    return out_BTNH[..., :V], total_BNT


def block_backward(
    request: Request, inputs: Inputs, rows: Rows, *, sizes: Sizes = (), interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`BlockKernel.backward`."""
    H, V = inputs.q_BTNH.shape[3], inputs.v_BSKH.shape[3]
    params = KernelParams(request, override_sizes(BLOCKS[width(H, V)], sizes), interpret)
    rows = rows._replace(d_out_BTNH=_widened(rows.d_out_BTNH, width(H, V)))
    d_q, d_k, d_v = gradients(params, _padded(inputs, width(H, V)), rows)
    return d_q[..., :H], d_k[..., :H], d_v[..., :V]


def _padded(inputs: Inputs, wide: int) -> Inputs:
    q, k, v = (_widened(x, wide) for x in inputs[:3])
    return inputs._replace(q_BTNH=q, k_BSKH=k, v_BSKH=v)


def _widened(x: jax.Array, wide: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide - x.shape[3])))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(params: KernelParams, inputs: Inputs) -> jax.Array:
    return _outputs(params, inputs)[0]


def _forward(params: KernelParams, inputs: Inputs) -> tuple[jax.Array, tuple[Inputs, jax.Array, jax.Array]]:
    out_BTNH, total_BNT = checkpoint_name(_outputs(params, inputs), CHECKPOINT_NAME)
    return out_BTNH, (inputs, out_BTNH, total_BNT)


def _outputs(params: KernelParams, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The outputs, and for the backward pass also log2 of the sum of each row's exponentials."""
    q_BTNH = inputs.q_BTNH
    B, T, N, _ = q_BTNH.shape
    block = params.blocks.forward
    sizes = _Sizes.of(inputs, block)
    specs = sizes.by_queries
    out_BTNH, total_BNT = pl.pallas_call(
        partial(_forward_kernel, params=params),
        grid=(T // sizes.C, N, B),
        in_specs=[specs.inputs(inputs)],
        out_specs=[specs.q, specs.row],
        out_shape=[jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        compiler_params=plt.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=params.interpret,
        name="attention_forward",
    )(inputs)
    return out_BTNH, total_BNT


def _backward(
    params: KernelParams, residuals: tuple[Inputs, jax.Array, jax.Array], d_out_BTNH: jax.Array
) -> tuple[Inputs]:
    inputs, out_BTNH, total_BNT = residuals
    rows = Rows.of(out_BTNH, total_BNT, d_out_BTNH)
    return (Inputs(*gradients(params, inputs, rows), rows.d_sinks(inputs), None, None),)


def gradients(params: KernelParams, inputs: Inputs, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values."""
    q_BTNH, k_BSKH = inputs.q_BTNH, inputs.k_BSKH
    (B, T, N, _), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape

    block = params.blocks.for_queries
    sizes = _Sizes.of(inputs, block)
    specs = sizes.by_queries
    d_q_BTNH = pl.pallas_call(
        partial(_queries_kernel, params=params),
        grid=(T // sizes.C, N, B),
        in_specs=[specs.inputs(inputs), Rows(specs.q, specs.row, specs.row)],
        out_specs=specs.q,
        out_shape=jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype),
        compiler_params=plt.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=params.interpret,
        name="attention_backward_queries",
    )(inputs, rows)

    block = params.blocks.for_keys
    sizes = _Sizes.of(inputs, block)
    specs = sizes.by_keys
    kv_shape = jax.ShapeDtypeStruct(k_BSKH.shape, k_BSKH.dtype)
    d_k_BSKH, d_v_BSKH = pl.pallas_call(
        partial(_keys_kernel, params=params),
        grid=(S // sizes.D, K, B),
        in_specs=[specs.inputs(inputs), Rows(specs.q, specs.row, specs.row)],
        out_specs=[specs.kv, specs.kv],
        out_shape=[kv_shape, kv_shape],
        compiler_params=plt.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=params.interpret,
        name="attention_backward_keys",
    )(inputs, rows)
    return d_q_BTNH, d_k_BSKH, d_v_BSKH


_attend.defvjp(_forward, _backward)


class _Specs(NamedTuple):
    """Block specs of a program's arrays."""

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
        """A block of queries of one head, the last block first because it takes longest; all keys."""
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


def _forward_kernel(refs: Inputs, out_ref: Any, total_ref: Any, *, params: KernelParams) -> None:
    """Online softmax (Milakov and Gimelshein, 2018); a sink is a key whose value is zero."""
    (C, H), S = refs.q_BTNH.shape, refs.k_BSKH.shape[0]
    D = math.gcd(params.blocks.forward.keys, S)
    start = (pl.num_programs(0) - 1 - pl.program_id(0)) * C
    q_CH = refs.q_BTNH[...]
    q_segments = None if refs.q_segments_BT is None else refs.q_segments_BT[...]

    def step(j: jax.Array, carry: Any, *, masked: bool) -> Any:
        sums_CH, top_C, total_C = carry
        keys = pl.ds(j * D, D)
        logits_CD = _logits(q_CH, refs.k_BSKH[keys, :], params.request)[0]
        if masked:
            kv_segments = None if refs.kv_segments_BS is None else refs.kv_segments_BS[keys]
            is_visible = _block_mask(params.request, (start, j * D), (C, D), q_segments, kv_segments)
            logits_CD = jnp.where(is_visible, logits_CD, LOWEST)
        new_top_C = jnp.maximum(top_C, logits_CD.max(axis=1))
        weights_CD = jnp.exp2(logits_CD - new_top_C[:, None])
        rescale_C = jnp.exp2(top_C - new_top_C)
        v_DH = refs.v_BSKH[keys, :]
        new_CH = jnp.dot(weights_CD.astype(v_DH.dtype), v_DH, preferred_element_type=jnp.float32)
        return sums_CH * rescale_C[:, None] + new_CH, new_top_C, total_C * rescale_C + weights_CD.sum(axis=1)

    top_C, total_C = jnp.full((C,), LOWEST, jnp.float32), jnp.zeros((C,), jnp.float32)
    if refs.sinks_N is not None:
        top_C, total_C = jnp.full((C,), refs.sinks_N[...].astype(jnp.float32) * LOG2E), total_C + 1
    ranges = key_ranges(params.request, start, C=C, D=D, S=S, has_segments=q_segments is not None)
    sums_CH, top_C, total_C = fold_blocks(ranges, step, (jnp.zeros((C, H), jnp.float32), top_C, total_C))
    # A query that sees no key has accumulated masked ones.
    share_C = jnp.where(top_C == LOWEST, 0.0, 1 / total_C)
    out_ref[...] = (sums_CH * share_C[:, None]).astype(out_ref.dtype)
    total_ref[...] = top_C + jnp.log2(total_C)


def _queries_kernel(refs: Inputs, rows: Any, d_q_ref: Any, *, params: KernelParams) -> None:
    (C, H), S = refs.q_BTNH.shape, refs.k_BSKH.shape[0]
    D = math.gcd(params.blocks.for_queries.keys, S)
    start = (pl.num_programs(0) - 1 - pl.program_id(0)) * C
    q_CH, (d_out_CH, total_C, mean_C) = refs.q_BTNH[...], (ref[...] for ref in rows)
    q_segments = None if refs.q_segments_BT is None else refs.q_segments_BT[...]

    def step(j: jax.Array, d_q_CH: jax.Array, *, masked: bool) -> jax.Array:
        keys = pl.ds(j * D, D)
        k_DH = refs.k_BSKH[keys, :]
        logits_CD, slope_CD = _logits(q_CH, k_DH, params.request)
        weights_CD = jnp.exp2(logits_CD - total_C[:, None])
        if masked:
            kv_segments = None if refs.kv_segments_BS is None else refs.kv_segments_BS[keys]
            is_visible = _block_mask(params.request, (start, j * D), (C, D), q_segments, kv_segments)
            weights_CD = jnp.where(is_visible, weights_CD, 0.0)
        d_weights_CD = jnp.dot(d_out_CH, refs.v_BSKH[keys, :].T, preferred_element_type=jnp.float32)
        d_logits_CD = weights_CD * (d_weights_CD - mean_C[:, None]) * slope_CD
        return d_q_CH + jnp.dot(d_logits_CD.astype(k_DH.dtype), k_DH, preferred_element_type=jnp.float32)

    ranges = key_ranges(params.request, start, C=C, D=D, S=S, has_segments=q_segments is not None)
    d_q_CH = fold_blocks(ranges, step, jnp.zeros((C, H), jnp.float32))
    d_q_ref[...] = (d_q_CH * params.request.scale).astype(d_q_ref.dtype)


def _keys_kernel(refs: Inputs, rows: Any, d_k_ref: Any, d_v_ref: Any, *, params: KernelParams) -> None:
    """Everything is transposed, keys by queries, so that the weights are a left operand, which may be in registers."""
    (D, H), (T, G, _) = refs.k_BSKH.shape, refs.q_BTNH.shape
    C = math.gcd(params.blocks.for_keys.queries, T)
    start = pl.program_id(0) * D
    k_DH, v_DH = refs.k_BSKH[...], refs.v_BSKH[...]
    d_out_ref, total_ref, mean_ref = rows
    kv_segments = None if refs.kv_segments_BS is None else refs.kv_segments_BS[...]

    def step(i: jax.Array, carry: Any, *, masked: bool, g: jax.Array) -> Any:
        d_k_DH, d_v_DH = carry
        queries = pl.ds(i * C, C)
        q_CH, d_out_CH = refs.q_BTNH[queries, g, :], d_out_ref[queries, g, :]
        logits_DC, slope_DC = _logits(k_DH, q_CH, params.request)
        weights_DC = jnp.exp2(logits_DC - total_ref[g, queries][None, :])
        if masked:
            q_segments = None if refs.q_segments_BT is None else refs.q_segments_BT[queries]
            is_visible = _block_mask(params.request, (i * C, start), (C, D), q_segments, kv_segments, transposed=True)
            weights_DC = jnp.where(is_visible, weights_DC, 0.0)
        d_v_DH += jnp.dot(weights_DC.astype(d_out_CH.dtype), d_out_CH, preferred_element_type=jnp.float32)
        d_weights_DC = jnp.dot(v_DH, d_out_CH.T, preferred_element_type=jnp.float32)
        d_logits_DC = weights_DC * (d_weights_DC - mean_ref[g, queries][None, :]) * slope_DC
        d_k_DH += jnp.dot(d_logits_DC.astype(q_CH.dtype), q_CH, preferred_element_type=jnp.float32)
        return d_k_DH, d_v_DH

    ranges = query_ranges(params.request, start, C=C, D=D, T=T, has_segments=kv_segments is not None)
    zeros = jnp.zeros((D, H), jnp.float32)
    d_k_DH, d_v_DH = jax.lax.fori_loop(
        0, G, lambda g, carry: fold_blocks(ranges, partial(step, g=g), carry), (zeros, zeros)
    )
    d_k_ref[...] = (d_k_DH * params.request.scale).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v_DH.astype(d_v_ref.dtype)


def _block_mask(
    request: Request,
    first: tuple[jax.Array, jax.Array],
    shape: tuple[int, int],
    q_segments: jax.Array | None,
    kv_segments: jax.Array | None,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Mask [C, D], or [D, C] if transposed, of the keys that queries see; `first`: first query and key of the block."""
    column, row = (slice(None), None), (None, slice(None))
    of: Any = (row, column) if transposed else (column, row)
    q, k = ((start + jnp.arange(size))[at] for start, size, at in zip(first, shape, of, strict=True))
    segments = (None if ids is None else ids[at] for ids, at in zip((q_segments, kv_segments), of, strict=True))
    return visible_mask(request, q, k, *segments)


def _logits(a: jax.Array, b: jax.Array, request: Request) -> tuple[jax.Array, jax.Array | float]:
    """Logits of the rows of a and b in units of log 2, and their derivative by scale * a b^T in natural units."""
    qk = jnp.dot(a, b.T, preferred_element_type=jnp.float32)
    if request.softcap is None:
        return qk * (request.scale * LOG2E), 1.0
    # tanh computed from 2^x: its absolute error is that of a number near one, so the logits' error is 1e-7 of the cap.
    tanh = 1 - 2 / (1 + jnp.exp2(qk * (2 * LOG2E * request.scale / request.softcap)))
    return tanh * (request.softcap * LOG2E), 1 - tanh * tanh
