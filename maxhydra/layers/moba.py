"""Mixture of block attention (Lu et al., 2025): a query attends to its own block of keys and to the best earlier ones.

The score of an earlier block is the dot product of the query with the mean of the block's keys, separately for each
query head. The top_k blocks include the query's own, of which it sees the keys up to itself. The choice has no
gradient. Blocks are counted from the start of each document.

All logits are computed and those of other blocks are masked, for a few queries at a time: this costs what dense
attention costs.

B batch, T queries, S keys, C blocks, N query heads, K key heads, G = N / K, H head size, Q queries of a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.config.schema import model as config
from maxhydra.kernels.attention import Request
from maxhydra.layers.attention_heads import chunk_segments
from maxhydra.layers.context import Context
from maxhydra.layers.kv_cache import KeysValues

# Queries whose logits are in memory at a time.
CHUNK = 128


class BlockSpec(NamedTuple):
    """Size of a block, and how many a query attends to."""

    size: int
    top_k: int

    @classmethod
    def of(cls, moba: config.Moba) -> "BlockSpec | None":
        """None for attention to all visible keys."""
        return None if moba.block_size is None else cls(moba.block_size, moba.top_k)


class Places(NamedTuple):
    """Where tokens [B, T] are: their order in the row, their document (0: hidden) and their block."""

    order_BT: jax.Array
    document_BT: jax.Array
    block_BT: jax.Array

    @classmethod
    def in_row(cls, ctx: Context, size: int) -> "Places":
        """Tokens of one call, whose rows hold one or several documents."""
        document_BT = ctx.is_real_BT.astype(jnp.int32) if ctx.segments is None else ctx.segments
        block_BT = chunk_segments(document_BT, ctx.positions, size)
        assert block_BT is not None
        return cls(jnp.broadcast_to(jnp.arange(ctx.positions.shape[1]), ctx.positions.shape), document_BT, block_BT)

    @classmethod
    def cached(cls, positions_BT: jax.Array, size: int) -> "Places":
        """Tokens of a cache, whose rows are one document each, by their positions; -1 is hidden."""
        is_real_BT = positions_BT >= 0
        block_BT = jnp.where(is_real_BT, positions_BT // size + 1, 0)
        return cls(positions_BT, is_real_BT.astype(jnp.int32), block_BT)


def visible_in_blocks(blocks: BlockSpec, seq_len: int) -> float:
    """Mean number of keys that a token attends to: those of earlier blocks, and of the token's block up to itself."""
    size, earlier = blocks.size, blocks.top_k - 1
    return sum(min(token // size, earlier) * size + token % size + 1 for token in range(seq_len)) / seq_len


def attend_to_blocks(
    q_BTNH: jax.Array, keys_values: KeysValues, request: Request, ctx: Context, *, blocks: BlockSpec
) -> jax.Array:
    """[B, T, N, H] attention over the tokens of this call, or over the cache, which includes them."""
    k_BSKH, v_BSKH, positions_BS = keys_values
    # Blocks are numbered from 1; in a row of several documents each may end with a partial block.
    count = k_BSKH.shape[1] // blocks.size + 2
    if positions_BS is not None:
        queries, keys = (Places.cached(at, blocks.size) for at in (ctx.cached_positions_BT, positions_BS))
    else:
        queries = keys = Places.in_row(ctx, blocks.size)
        count = count if ctx.segments is None else k_BSKH.shape[1] + 1
    return block_attention(
        q_BTNH, k_BSKH, v_BSKH, request, queries=queries, keys=keys, top_k=blocks.top_k, blocks=count
    )


def block_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    *,
    queries: Places,
    keys: Places,
    top_k: int,
    blocks: int,
) -> jax.Array:
    """[B, T, N, H] attention to the chosen blocks; `blocks`: more than the largest block number of a key."""
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    mean_BCKH, document_BC = _block_means(k_BSKH, keys, blocks)
    size = CHUNK if T % CHUNK == 0 else T

    @jax.checkpoint
    def attend(chunk: tuple[jax.Array, Places]) -> jax.Array:
        q_BQKGH, at = chunk[0].reshape(B, size, K, N // K, H), chunk[1]
        scores_BKGQC = jnp.einsum("BQKGH,BCKH->BKGQC", jax.lax.stop_gradient(q_BQKGH.astype(jnp.float32)), mean_BCKH)
        chosen_BKGQC = _choose(scores_BKGQC, at, document_BC, top_k)
        chosen_BKGQS = jnp.take_along_axis(chosen_BKGQC, keys.block_BT[:, None, None, None], axis=-1)
        is_earlier_BQS = keys.order_BT[:, None] <= at.order_BT[:, :, None]
        is_same_BQS = (keys.document_BT[:, None] == at.document_BT[:, :, None]) & (keys.document_BT > 0)[:, None]
        mask_BKGQS = chosen_BKGQS & (is_earlier_BQS & is_same_BQS)[:, None, None]
        logits_BKGQS = jnp.einsum("BQKGH,BSKH->BKGQS", q_BQKGH, k_BSKH).astype(request.softmax_dtype) * request.scale
        # Padding sees nothing: the lowest finite logit gives it a mean instead of NaN.
        logits_BKGQS = jnp.where(mask_BKGQS, logits_BKGQS, jnp.finfo(logits_BKGQS.dtype).min)
        weights_BKGQS = jax.nn.softmax(logits_BKGQS, axis=-1).astype(v_BSKH.dtype)
        return jnp.einsum("BKGQS,BSKH->BQKGH", weights_BKGQS, v_BSKH).reshape(B, size, N, H)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, T // size, size, *x.shape[2:]), 1, 0)

    out_CBQNH = jax.lax.map(attend, jax.tree.map(cut, (q_BTNH, queries)))
    return jnp.moveaxis(out_CBQNH, 0, 1).reshape(B, T, N, H)


def _block_means(k_BSKH: jax.Array, keys: Places, blocks: int) -> tuple[jax.Array, jax.Array]:
    """[B, C, K, H] mean of the visible keys of each block, and [B, C] its document; 0 for an empty block."""

    def of_row(k_SKH: jax.Array, document_S: jax.Array, block_S: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_real_S = document_S > 0
        k_SKH = jnp.where(is_real_S[:, None, None], k_SKH.astype(jnp.float32), 0)
        sums_CKH = jax.ops.segment_sum(k_SKH, block_S, blocks)
        counts_C = jax.ops.segment_sum(is_real_S.astype(jnp.float32), block_S, blocks)
        document_C = jnp.maximum(jax.ops.segment_max(document_S, block_S, blocks), 0)
        return sums_CKH / jnp.maximum(counts_C, 1)[:, None, None], document_C

    return jax.vmap(of_row)(jax.lax.stop_gradient(k_BSKH), keys.document_BT, keys.block_BT)


def _choose(scores_BKGQC: jax.Array, queries: Places, document_BC: jax.Array, top_k: int) -> jax.Array:
    """Whether each query attends to each block: its own, and the best earlier ones of its document."""
    number_C = jnp.arange(scores_BKGQC.shape[-1])
    is_own_BQC = queries.block_BT[:, :, None] == number_C
    is_same_BQC = queries.document_BT[:, :, None] == document_BC[:, None]
    is_past_BQC = is_same_BQC & (number_C < queries.block_BT[:, :, None])
    scores_BKGQC = jnp.where(is_past_BQC[:, None, None], scores_BKGQC, -jnp.inf)
    scores_BKGQC = jnp.where(is_own_BQC[:, None, None], jnp.inf, scores_BKGQC)
    last_BKGQ1 = jax.lax.top_k(scores_BKGQC, min(top_k, scores_BKGQC.shape[-1]))[0][..., -1:]
    return (scores_BKGQC >= last_BKGQ1) & (scores_BKGQC > -jnp.inf)
