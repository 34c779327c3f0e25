"""What the kernels that go block by block share: what goes in, which blocks of keys and queries meet, what of them is
hidden.

C queries and D keys of a block; `start` is the first token of the block at hand.
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
# Hidden logits; finite, since the difference of two infinities is not a number, and a power of two, so that a product
# with it is exact and a fused multiply-add of a hidden logit and the top that comes of it gives zero.
LOWEST = -(2.0**100)


class Inputs(NamedTuple):
    """What the kernels read; None where there is none."""

    q_BTNH: Any
    k_BSKH: Any
    v_BSKH: Any
    sinks_N: Any
    q_segments_BT: Any
    kv_segments_BS: Any


class Rows(NamedTuple):
    """What the backward pass has with the queries."""

    d_out_BTNH: Any
    total_BNT: Any
    """log2 of the sum of each row's exponentials."""
    mean_BNT: Any
    """Of the gradients of the weights, by the weights."""

    @classmethod
    def of(cls, out_BTNH: jax.Array, total_BNT: jax.Array, d_out_BTNH: jax.Array) -> "Rows":
        mean_BNT = jnp.einsum("BTNH,BTNH->BNT", out_BTNH, d_out_BTNH, preferred_element_type=jnp.float32)
        return cls(d_out_BTNH, total_BNT, mean_BNT)

    def d_sinks(self, inputs: Inputs) -> jax.Array | None:
        if inputs.sinks_N is None:
            return None
        share_BNT = jnp.exp2(inputs.sinks_N.astype(jnp.float32)[:, None] * LOG2E - self.total_BNT)
        return -jnp.sum(share_BNT * self.mean_BNT, axis=(0, 2)).astype(inputs.sinks_N.dtype)


def seen(
    request: Request, q: jax.Array, k: jax.Array, of_queries: jax.Array | None, of_keys: jax.Array | None
) -> jax.Array:
    """Which keys the queries see, where the numbers of tokens and their segments spread to one shape."""
    masks = []
    if request.causal:
        masks.append(k <= q)
    if request.window is not None:
        masks.append(k > q - request.window)
    if request.chunk is not None:
        masks.append(jax.lax.div(k, request.chunk) == jax.lax.div(q, request.chunk))
    if of_queries is not None and of_keys is not None:
        masks.append((of_queries == of_keys) & (of_queries != 0))
    return reduce(jnp.logical_and, masks) if masks else jnp.full(jnp.broadcast_shapes(q.shape, k.shape), True)


class Ranges(NamedTuple):
    """Blocks from first to last; from whole to broken, each query sees each key."""

    first: Any
    whole: Any
    broken: Any
    last: Any


def key_ranges(request: Request, start: jax.Array, *, C: int, D: int, S: int, is_tagged: bool) -> Ranges:
    """Blocks of keys for the queries from start on."""
    first, last, whole, broken = _all(S // D)
    if request.causal:
        last, broken = pl.cdiv(start + C, D), jax.lax.div(start + 1, D)
    if request.window is not None:
        first = jax.lax.div(jnp.maximum(start - request.window + 1, 0), D)
        whole = pl.cdiv(jnp.maximum(start + C - request.window, 0), D)
    if request.chunk is not None:
        # The first query's chunk reaches back farthest, the last one's least.
        first = jax.lax.div(jax.lax.div(start, request.chunk) * request.chunk, D)
        whole = pl.cdiv(jax.lax.div(start + C - 1, request.chunk) * request.chunk, D)
    return _ordered(first, last if is_tagged else whole, broken, last)


def query_ranges(request: Request, start: jax.Array, *, C: int, D: int, T: int, is_tagged: bool) -> Ranges:
    """Blocks of queries for the keys from start on."""
    first, last, whole, broken = _all(T // C)
    if request.causal:
        first, whole = jax.lax.div(start, C), pl.cdiv(start + D - 1, C)
    if request.window is not None:
        last = jnp.minimum(last, pl.cdiv(start + D - 1 + request.window, C))
        broken = jax.lax.div(start + request.window, C)
    if request.chunk is not None:
        last = jnp.minimum(last, pl.cdiv((jax.lax.div(start + D - 1, request.chunk) + 1) * request.chunk, C))
        broken = jax.lax.div((jax.lax.div(start, request.chunk) + 1) * request.chunk, C)
    return _ordered(first, last if is_tagged else whole, broken, last)


def _all(count: int) -> tuple[Any, Any, Any, Any]:
    """First, last, first and last whole one of so many blocks that are all seen whole."""
    return 0, count, 0, count


def _ordered(first: Any, whole: Any, broken: Any, last: Any) -> Ranges:
    whole = jnp.clip(whole, first, last)
    return Ranges(first, whole, jnp.clip(broken, whole, last), last)


def over(ranges: Ranges, step: Callable[..., Any], so_far: Any) -> Any:
    """The steps of all blocks; what a mask would not change goes without."""
    for start, stop, masked in (
        (ranges.first, ranges.whole, True),
        (ranges.whole, ranges.broken, False),
        (ranges.broken, ranges.last, True),
    ):
        so_far = jax.lax.fori_loop(start, stop, partial(step, masked=masked), so_far)
    return so_far
