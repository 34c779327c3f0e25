"""Shared by the block-wise attention kernels: inputs, residuals, masks, and which blocks of keys and queries interact.

C queries and D keys of a block; `start` is the first token of the current block.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxhydra.kernels.attention.spec import Request

LOG2E = math.log2(math.e)
# Masked logits; finite, since the difference of two infinities is NaN, and a power of two, so that multiplying by it is
# exact and a fused multiply-add of a masked logit and a maximum that comes from it gives zero.
LOWEST = -(2.0**100)


class Inputs(NamedTuple):
    """Inputs of the kernels; None if absent."""

    q_BTNH: Any
    k_BSKH: Any
    v_BSKH: Any
    sinks_N: Any
    q_segments_BT: Any
    kv_segments_BS: Any


class Rows(NamedTuple):
    """Per-query inputs of the backward pass."""

    d_out_BTNH: Any
    total_BNT: Any
    """log2 of the sum of each row's exponentials."""
    mean_BNT: Any
    """Mean of the gradients of the weights, weighted by the weights."""

    @classmethod
    def of(cls, out_BTNH: jax.Array, total_BNT: jax.Array, d_out_BTNH: jax.Array) -> "Rows":
        mean_BNT = jnp.einsum("BTNH,BTNH->BNT", out_BTNH, d_out_BTNH, preferred_element_type=jnp.float32)
        return cls(d_out_BTNH, total_BNT, mean_BNT)

    def d_sinks(self, inputs: Inputs) -> jax.Array | None:
        if inputs.sinks_N is None:
            return None
        share_BNT = jnp.exp2(inputs.sinks_N.astype(jnp.float32)[:, None] * LOG2E - self.total_BNT)
        return -jnp.sum(share_BNT * self.mean_BNT, axis=(0, 2)).astype(inputs.sinks_N.dtype)


def visible_mask(
    request: Request, q: jax.Array, k: jax.Array, q_segments: jax.Array | None, kv_segments: jax.Array | None
) -> jax.Array:
    """Mask of the keys that the queries see; token indices and segments must broadcast to one shape."""
    q = q + request.offset if request.offset else q
    masks = []
    if request.causal:
        masks.append(k <= q)
    if request.window is not None:
        masks.append(k > q - request.window)
    if request.chunk is not None:
        masks.append(jax.lax.div(k, request.chunk) == jax.lax.div(q, request.chunk))
    if q_segments is not None and kv_segments is not None:
        masks.append((q_segments == kv_segments) & (q_segments != 0))
    return reduce(jnp.logical_and, masks) if masks else jnp.full(jnp.broadcast_shapes(q.shape, k.shape), True)


class Ranges(NamedTuple):
    """Blocks first..last; in whole..broken every query sees every key, so that no mask is needed."""

    first: Any
    whole: Any
    broken: Any
    last: Any


def key_ranges(request: Request, start: jax.Array, *, C: int, D: int, S: int, has_segments: bool) -> Ranges:
    """Blocks of keys that the C queries from `start` see."""
    start = start + request.offset if request.offset else start
    first, last, whole, broken = _all(S // D)
    if request.causal:
        last, broken = pl.cdiv(start + C, D), jax.lax.div(start + 1, D)
    if request.window is not None:
        first = jax.lax.div(jnp.maximum(start - request.window + 1, 0), D)
        whole = pl.cdiv(jnp.maximum(start + C - request.window, 0), D)
    if request.chunk is not None:
        # The first query's chunk starts earliest, the last one's latest.
        first = jax.lax.div(jax.lax.div(start, request.chunk) * request.chunk, D)
        whole = pl.cdiv(jax.lax.div(start + C - 1, request.chunk) * request.chunk, D)
    return _ordered(first, last if has_segments else whole, broken, last)


def query_ranges(request: Request, start: jax.Array, *, C: int, D: int, T: int, has_segments: bool) -> Ranges:
    """Blocks of queries that see the D keys from `start`."""

    def query(key: Any) -> Any:
        """The query at this index of the keys; the first one for earlier keys."""
        return jnp.maximum(key - request.offset, 0) if request.offset else key

    first, last, whole, broken = _all(T // C)
    if request.causal:
        first, whole = jax.lax.div(query(start), C), pl.cdiv(query(start + D - 1), C)
    if request.window is not None:
        last = jnp.minimum(last, pl.cdiv(query(start + D - 1 + request.window), C))
        broken = jax.lax.div(query(start + request.window), C)
    if request.chunk is not None:
        last = jnp.minimum(last, pl.cdiv((jax.lax.div(start + D - 1, request.chunk) + 1) * request.chunk, C))
        broken = jax.lax.div((jax.lax.div(start, request.chunk) + 1) * request.chunk, C)
    return _ordered(first, last if has_segments else whole, broken, last)


def _all(count: int) -> tuple[Any, Any, Any, Any]:
    """First, last, whole and broken of `count` blocks that are all fully visible."""
    return 0, count, 0, count


def _ordered(first: Any, whole: Any, broken: Any, last: Any) -> Ranges:
    whole = jnp.clip(whole, first, last)
    return Ranges(first, whole, jnp.clip(broken, whole, last), last)


def fold_blocks(ranges: Ranges, step: Callable[..., Any], carry: Any) -> Any:
    """Fold the step over all blocks, without a mask where it would change nothing."""
    for start, stop, masked in (
        (ranges.first, ranges.whole, True),
        (ranges.whole, ranges.broken, False),
        (ranges.broken, ranges.last, True),
    ):
        carry = jax.lax.fori_loop(start, stop, partial(step, masked=masked), carry)
    return carry
