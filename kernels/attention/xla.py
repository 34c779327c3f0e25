"""Attention as einsums for the XLA compiler: runs everywhere, serves every request.

Key and value heads are not repeated: query heads that share one form a group, a separate dimension. Long sequences are
processed in blocks of queries (Rabe and Staats, 2021): the logits of only one block exist at a time, also in the
backward pass, which recomputes them. A causal block reads only the keys that it can see, which also saves work.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention.spec import Request, TokenInfo, visible
from maxhydra.kernels.matmul import widening_einsum

# Queries of a block: an eighth of the sequence within these bounds. Eight causal blocks leave 56 % of the work, and ran
# 3x as fast as one, forward and backward, on a CPU at 1024 tokens. Blocks are unrolled, so their number costs compile
# time; the upper bound limits the logits of one block for long sequences.
MIN_BLOCK, MAX_BLOCK = 128, 1024
# Keys are sliced at multiples of a TPU's vector lanes.
LANES = 128


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    tokens: TokenInfo,
    sinks_N: jax.Array | None,
) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    sinks_KG = None if sinks_N is None else sinks_N.reshape(K, N // K)
    if T == 1:
        mask_BTS = visible(request, tokens, queries=range(1), keys=range(S))
        q_BKGH = q_BTNH.reshape(B, K, N // K, H)
        return _attend_one(q_BKGH, k_BSKH, v_BSKH, mask_BTS, request, sinks_KG).reshape(B, T, N, -1)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)

    def block(q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array | None) -> jax.Array:
        return _attend(q_BTKGH, k_BSKH, v_BSKH, mask_BTS, request, sinks_KG)

    parts = list(_blocks(T, S, request, by_position=tokens.q_positions_BT is not None))
    run = block if len(parts) == 1 else jax.checkpoint(block)
    outputs = []
    for queries, keys in parts:
        q_part = q_BTKGH[:, queries.start : queries.stop]
        k_part, v_part = k_BSKH[:, keys.start : keys.stop], v_BSKH[:, keys.start : keys.stop]
        outputs.append(run(q_part, k_part, v_part, visible(request, tokens, queries=queries, keys=keys)))
    return jnp.concatenate(outputs, axis=1).reshape(B, T, N, -1)


def _attend(
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array | None,
    request: Request,
    sinks_KG: jax.Array | None,
) -> jax.Array:
    logits_BKGTS = widening_einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, dtype=request.softmax_dtype) * request.scale
    if request.softcap is not None:
        logits_BKGTS = request.softcap * jnp.tanh(logits_BKGTS / request.softcap)
    mask_BKGTS = None if mask_BTS is None else mask_BTS[:, None, None]
    sinks_KG1 = None if sinks_KG is None else sinks_KG[:, :, None]
    weights_BKGTS = _softmax(logits_BKGTS, mask_BKGTS, sinks_KG1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH)


def _attend_one(
    q_BKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array | None,
    request: Request,
    sinks_KG: jax.Array | None,
) -> jax.Array:
    """One query per row, as in decoding: keys and weights are the left operands, so that no key or value is moved.

    This requires that the tokens of a head are contiguous. It takes two thirds of the time of the einsums on a CPU.
    """
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    of_heads = ((0, 1), (0, 1))
    logits_BKSG = jax.lax.dot_general(
        k_BKSH, q_BKGH, (((3,), (3,)), of_heads), preferred_element_type=request.softmax_dtype
    )
    # The barrier keeps the compiler from folding the transpose back into the matmul.
    logits_BKGS = jax.lax.optimization_barrier(logits_BKSG).swapaxes(2, 3) * request.scale
    if request.softcap is not None:
        logits_BKGS = request.softcap * jnp.tanh(logits_BKGS / request.softcap)
    mask_BKGS = None if mask_BTS is None else mask_BTS[:, None]
    weights_BKGS = _softmax(logits_BKGS, mask_BKGS, sinks_KG).astype(v_BSKH.dtype)
    return jax.lax.dot_general(weights_BKGS, v_BKSH, (((3,), (2,)), of_heads))


def _softmax(logits: jax.Array, mask: jax.Array | None, sinks: jax.Array | None) -> jax.Array:
    """Softmax over the unmasked logits; a sink, one per head, takes its share of the weight and adds no value.

    With a sink the largest logit is always finite, so masked logits may be -inf.
    """
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1, where=mask)
    sinks = sinks[..., None].astype(logits.dtype)
    logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks))
    weights = jnp.exp(logits - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top))


def _blocks(T: int, S: int, request: Request, *, by_position: bool) -> Iterator[tuple[range, range]]:
    """Queries of each block, and the range of keys that any of them may see."""
    size = min(max(MIN_BLOCK, -(-T // 8)), MAX_BLOCK)
    for start in range(0, T, size):
        stop = min(start + size, T)
        if by_position or not request.causal:
            yield range(start, stop), range(S)
        else:
            index = start + request.offset
            first = 0 if request.window is None else max(0, index - request.window + 1)
            first = first if request.chunk is None else start // request.chunk * request.chunk
            yield range(start, stop), range(first // LANES * LANES, stop + request.offset)
