"""What the forward and the backward kernel share: logits, masks, loops, and arrays as the matrix unit wants them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import LOG2E, Ranges, seen
from maxhydra.kernels.attention.mosaic.params import How
from maxhydra.kernels.attention.spec import Request

# Arrays in registers as the matrix unit has them, and a number for each row or column of one.
MATRIX = plgpu.Layout.WGMMA
COLUMN, ROW = MATRIX.reduce(1), MATRIX.reduce(0)
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def zeros(*shape: int, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), layout)


def down(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number a row."""
    return jax.lax.broadcast_in_dim(values, shape, [0])


def across(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number a column."""
    return jax.lax.broadcast_in_dim(values, shape, [1])


def logits(product: jax.Array, request: Request) -> tuple[jax.Array, float, jax.Array | None]:
    """Logits and the factor that takes them to units of log 2, and their slope against scale * product; None: one."""
    if request.softcap is None:
        return product, request.scale * LOG2E, None
    # tanh from 2^x: its error is that of a number near one, so that of the logits is some 1e-7 of the cap. A quotient
    # takes more instructions than the square of an inverse root.
    root = jax.lax.rsqrt(1 + jnp.exp2(product * (2 * LOG2E * request.scale / request.softcap)))
    turned = 1 - 2 * root * root
    return turned, request.softcap * LOG2E, 1 - turned * turned


def hidden_as(
    fill: float, values: jax.Array, request: Request, first: tuple[Any, Any], segments: Any, *, query_axis: int
) -> jax.Array:
    """The values with those of hidden pairs replaced; `first` query and key of the block, and their segments."""
    shape = values.shape
    iota = partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=MATRIX)
    q, k = iota(query_axis) + first[0], iota(1 - query_axis) + first[1]
    of_queries = of_keys = None
    if segments is not None:
        spread = (down, across) if query_axis == 0 else (across, down)
        of_queries, of_keys = (put(one, shape) for put, one in zip(spread, segments, strict=True))
    return jnp.where(seen(request, q, k, of_queries, of_keys), values, fill)


def meetings(of_rows_BR: jax.Array, of_columns_BC: jax.Array, *, rows: int, columns: int) -> jax.Array:
    """From which to before which block of columns any has a segment in common with a block of rows, [B, blocks, 2].

    By the least and the largest segment of a block, so that blocks between may have none in common.
    """
    least, largest = [], []
    for segments, size in ((of_rows_BR, rows), (of_columns_BC, columns)):
        blocks = segments.reshape(segments.shape[0], -1, size)
        least.append(jnp.where(blocks == 0, jnp.iinfo(jnp.int32).max, blocks).min(axis=2))
        largest.append(blocks.max(axis=2))
    meet = (least[0][:, :, None] <= largest[1][:, None, :]) & (least[1][:, None, :] <= largest[0][:, :, None])
    first, beyond = jnp.argmax(meet, axis=2), meet.shape[2] - jnp.argmax(meet[:, :, ::-1], axis=2)
    return jnp.stack([first, jnp.where(meet.any(axis=2), beyond, first)], axis=2).astype(jnp.int32)


def narrowed(ranges: Ranges, meetings_ref: Any, b: Any, block: Any) -> Ranges:
    """The ranges without blocks before or behind which no segment is in common; all that is left is masked."""
    first = jnp.maximum(ranges.first, meetings_ref[b, block, 0])
    last = jnp.maximum(jnp.minimum(ranges.last, meetings_ref[b, block, 1]), first)
    return Ranges(first, last, last, last)


def over(ranges: Ranges, step: Callable[..., Any], so_far: Any, how: How, *, is_tagged: bool, backwards: bool) -> Any:
    """The steps of all blocks, masked where it may matter; a loop that is always empty is left out.

    Forwards is over queries, where causality breaks the first blocks, backwards over keys, where it breaks the last.
    """
    request = how.request
    before, inside, after = (
        (ranges.first, ranges.whole, True),
        (ranges.whole, ranges.broken, False),
        (ranges.broken, ranges.last, True),
    )
    if is_tagged:
        loops = [(ranges.first, ranges.last, True)]
    elif request.window is not None or request.chunk is not None:
        loops = [before, inside, after]
    elif not request.causal:
        loops = [inside]
    else:
        loops = [inside, after] if backwards else [before, inside]
    for start, stop, masked in reversed(loops) if backwards else loops:
        one = partial(_down, stop, step) if backwards else partial(_up, start, step)
        so_far = jax.lax.fori_loop(0, stop - start, partial(one, masked=masked), so_far)
    return so_far


def _up(start: Any, step: Callable[..., Any], n: Any, so_far: Any, *, masked: bool) -> Any:
    return step(start + n, so_far, masked=masked)


def _down(stop: Any, step: Callable[..., Any], n: Any, so_far: Any, *, masked: bool) -> Any:
    return step(stop - 1 - n, so_far, masked=masked)
