"""Flash attention (Dao, 2023) as loops of XLA matmuls: one block of queries by one of keys exists at a time.

It computes one block of keys of context parallelism (partials.py) where no GPU kernel does, on any platform. Blocks
that no query sees are skipped. Logits are in units of log 2, as in the GPU kernels.

Shapes as in spec.py; C queries and D keys of a block, I and J blocks of queries and keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention.blocks import LOG2E, LOWEST, Inputs, Rows, key_ranges, query_ranges, visible_mask
from maxhydra.kernels.attention.spec import Request

# Most queries and keys of a block: logits of 32 heads take 128 MiB a row.
BLOCK = 1024


def forward(request: Request, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The outputs in float32, and log2 of the sum of each query's exponentials, [B, N, T]."""
    T, sizes, blocks = inputs.q_BTNH.shape[1], _Sizes.of(inputs), _Blocks.of(inputs)

    def of_queries(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_BCKGH = blocks.q_IBCKGH[i]

        def step(j: jax.Array, carry: Any) -> Any:
            sums_BKGCV, top_BKGC, total_BKGC = carry
            logits_BKGCD, _ = _logits(q_BCKGH, blocks.k_JBDKH[j], request)
            logits_BKGCD = jnp.where(blocks.is_visible(request, sizes, i, j), logits_BKGCD, LOWEST)
            new_top_BKGC = jnp.maximum(top_BKGC, logits_BKGCD.max(axis=-1))
            weights_BKGCD = jnp.exp2(logits_BKGCD - new_top_BKGC[..., None])
            rescale_BKGC = jnp.exp2(top_BKGC - new_top_BKGC)
            v_BDKV = blocks.v_JBDKV[j]
            new_BKGCV = _matmul("BKGCD,BDKV->BKGCV", weights_BKGCD.astype(v_BDKV.dtype), v_BDKV)
            total_BKGC = total_BKGC * rescale_BKGC + weights_BKGCD.sum(axis=-1)
            return sums_BKGCV * rescale_BKGC[..., None] + new_BKGCV, new_top_BKGC, total_BKGC

        ranges = key_ranges(request, i * sizes.C, C=sizes.C, D=sizes.D, S=sizes.keys, has_segments=True)
        B, C, K, G, _ = q_BCKGH.shape
        top_BKGC = jnp.full((B, K, G, C), LOWEST, jnp.float32)
        sums_BKGCV = jnp.zeros((B, K, G, C, blocks.v_JBDKV.shape[-1]), jnp.float32)
        # A causal range ends behind the last key if the queries were padded.
        last = jnp.minimum(ranges.last, sizes.keys // sizes.D)
        carry = (sums_BKGCV, top_BKGC, jnp.zeros_like(top_BKGC))
        sums_BKGCV, top_BKGC, total_BKGC = jax.lax.fori_loop(ranges.first, last, step, carry)
        # A query that sees no key has accumulated masked ones, or nothing.
        share_BKGC = jnp.where(top_BKGC == LOWEST, 0.0, 1 / jnp.maximum(total_BKGC, 1e-30))
        return sums_BKGCV * share_BKGC[..., None], top_BKGC + jnp.log2(jnp.maximum(total_BKGC, 1.0))

    out_IBKGCV, total_IBKGC = jax.lax.map(of_queries, jnp.arange(blocks.q_IBCKGH.shape[0]))
    I, B, K, G, C, V = out_IBKGCV.shape
    out_BTNV = jnp.transpose(out_IBKGCV, (1, 0, 4, 2, 3, 5)).reshape(B, I * C, K * G, V)[:, :T]
    return out_BTNV, jnp.moveaxis(total_IBKGC, 0, 3).reshape(B, K * G, I * C)[:, :, :T]


def backward(request: Request, inputs: Inputs, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values in float32, with the weights of all keys of a query summing to one.

    Keys are the outer loop: their gradients are complete after it, and that of the queries is added to block by block.
    """
    (T, S), sizes, blocks = (x.shape[1] for x in inputs[:2]), _Sizes.of(inputs), _Blocks.of(inputs)
    of_rows = _RowBlocks.of(rows, sizes, groups=blocks.q_IBCKGH.shape[3:5])

    def of_keys(d_q_IBCKGH: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_BDKH, v_BDKV = blocks.k_JBDKH[j], blocks.v_JBDKV[j]

        def step(i: jax.Array, carry: Any) -> Any:
            d_q_IBCKGH, d_k_BDKH, d_v_BDKV = carry
            q_BCKGH, d_out_BCKGV = blocks.q_IBCKGH[i], of_rows.d_out_IBCKGV[i]
            logits_BKGCD, slope = _logits(q_BCKGH, k_BDKH, request)
            weights_BKGCD = jnp.exp2(logits_BKGCD - of_rows.total_IBKGC[i][..., None])
            weights_BKGCD = jnp.where(blocks.is_visible(request, sizes, i, j), weights_BKGCD, 0.0)
            d_v_BDKV += _matmul("BKGCD,BCKGV->BDKV", weights_BKGCD.astype(v_BDKV.dtype), d_out_BCKGV)
            d_weights_BKGCD = _matmul("BCKGV,BDKV->BKGCD", d_out_BCKGV, v_BDKV)
            d_logits_BKGCD = weights_BKGCD * (d_weights_BKGCD - of_rows.mean_IBKGC[i][..., None]) * slope
            d_logits_BKGCD = (d_logits_BKGCD * request.scale).astype(k_BDKH.dtype)
            d_k_BDKH += _matmul("BKGCD,BCKGH->BDKH", d_logits_BKGCD, q_BCKGH)
            new_BCKGH = _matmul("BKGCD,BDKH->BCKGH", d_logits_BKGCD, k_BDKH)
            return d_q_IBCKGH.at[i].add(new_BCKGH), d_k_BDKH, d_v_BDKV

        ranges = query_ranges(request, j * sizes.D, C=sizes.C, D=sizes.D, T=sizes.queries, has_segments=True)
        carry = (d_q_IBCKGH, *(jnp.zeros(x.shape, jnp.float32) for x in (k_BDKH, v_BDKV)))
        d_q_IBCKGH, d_k_BDKH, d_v_BDKV = jax.lax.fori_loop(ranges.first, ranges.last, step, carry)
        return d_q_IBCKGH, (d_k_BDKH, d_v_BDKV)

    zeros = jnp.zeros(blocks.q_IBCKGH.shape, jnp.float32)
    d_q_IBCKGH, (d_k, d_v) = jax.lax.scan(of_keys, zeros, jnp.arange(blocks.k_JBDKH.shape[0]))
    return _joined(d_q_IBCKGH, T).reshape(inputs.q_BTNH.shape), _joined(d_k, S), _joined(d_v, S)


class _Sizes(NamedTuple):
    """Queries and keys of a block, and in all blocks together, which may end with padding."""

    C: int
    D: int
    queries: int
    keys: int

    @classmethod
    def of(cls, inputs: Inputs) -> "_Sizes":
        T, S = (x.shape[1] for x in inputs[:2])
        C, D = min(T, BLOCK), min(S, BLOCK)
        return cls(C, D, -(-T // C) * C, -(-S // D) * D)


class _Blocks(NamedTuple):
    """Queries, keys, values and segments with their blocks as the leading dimension."""

    q_IBCKGH: jax.Array
    k_JBDKH: jax.Array
    v_JBDKV: jax.Array
    q_segments_IBC: jax.Array | None
    kv_segments_JBD: jax.Array | None
    num_keys: int

    @classmethod
    def of(cls, inputs: Inputs) -> "_Blocks":
        (B, T, N, H), (_, S, K, _), sizes = inputs.q_BTNH.shape, inputs.k_BSKH.shape, _Sizes.of(inputs)
        q_BTKGH = inputs.q_BTNH.reshape(B, T, K, N // K, H)
        of_queries = [_split(x, sizes.C) for x in (q_BTKGH, inputs.q_segments_BT)]
        of_keys = [_split(x, sizes.D) for x in (inputs.k_BSKH, inputs.v_BSKH, inputs.kv_segments_BS)]
        return cls(of_queries[0], *of_keys[:2], of_queries[1], of_keys[2], S)

    def is_visible(self, request: Request, sizes: _Sizes, i: jax.Array, j: jax.Array) -> jax.Array:
        """Mask [B or 1, 1, 1, C, D] of the keys of block j that the queries of block i see."""
        q_C1, k_1D = (i * sizes.C + jnp.arange(sizes.C))[:, None], (j * sizes.D + jnp.arange(sizes.D))[None, :]
        segments = (None, None)
        if self.q_segments_IBC is not None and self.kv_segments_JBD is not None:
            segments = (self.q_segments_IBC[i][:, :, None], self.kv_segments_JBD[j][:, None, :])
        mask = visible_mask(request, q_C1, k_1D, *segments)
        mask = mask if self.num_keys == sizes.keys else mask & (k_1D < self.num_keys)
        return mask.reshape(-1, 1, 1, sizes.C, sizes.D)


class _RowBlocks(NamedTuple):
    """`Rows` with their blocks as the leading dimension."""

    d_out_IBCKGV: jax.Array
    total_IBKGC: jax.Array
    mean_IBKGC: jax.Array

    @classmethod
    def of(cls, rows: Rows, sizes: _Sizes, groups: tuple[int, ...]) -> "_RowBlocks":
        B, T, _, V = rows.d_out_BTNH.shape

        def of_heads(x_BNT: jax.Array) -> jax.Array:
            x_IBCN = _split(x_BNT.swapaxes(1, 2), sizes.C)
            return jnp.moveaxis(x_IBCN, 2, 3).reshape(*x_IBCN.shape[:2], *groups, sizes.C)

        d_out_IBCKGV = _split(rows.d_out_BTNH.reshape(B, T, *groups, V), sizes.C)
        return cls(d_out_IBCKGV, of_heads(rows.total_BNT), of_heads(rows.mean_BNT))


def _split(x_BT: Any, size: int) -> Any:
    """[B, T, ...] to [blocks, B, size, ...], padded with zeros; None stays None."""
    if x_BT is None:
        return None
    B, T, *rest = x_BT.shape
    blocks = -(-T // size)
    padded = jnp.pad(x_BT, [(0, 0), (0, blocks * size - T), *((0, 0) for _ in rest)])
    return padded.reshape(B, blocks, size, *rest).swapaxes(0, 1)


def _joined(x_IBC: jax.Array, length: int) -> jax.Array:
    """The inverse of `_split`."""
    blocks, B, size, *rest = x_IBC.shape
    return x_IBC.swapaxes(0, 1).reshape(B, blocks * size, *rest)[:, :length]


def _matmul(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _logits(q_BCKGH: jax.Array, k_BDKH: jax.Array, request: Request) -> tuple[jax.Array, jax.Array | float]:
    """Logits in units of log 2, and their derivative by scale * q k^T in natural units."""
    logits_BKGCD = _matmul("BCKGH,BDKH->BKGCD", q_BCKGH, k_BDKH) * request.scale
    if request.softcap is None:
        return logits_BKGCD * LOG2E, 1.0
    tanh_BKGCD = jnp.tanh(logits_BKGCD / request.softcap)
    return tanh_BKGCD * (request.softcap * LOG2E), 1 - tanh_BKGCD * tanh_BKGCD
