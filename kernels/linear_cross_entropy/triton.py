"""Softmax, loss and the gradient of the logits in one go over each row, for GPUs in Pallas for Triton.

A program takes one row: once over it for the largest logit and the sum of exponentials, then over it again for the
gradient, which takes the place of the logits. Few rows are on their way at a time, and the second look finds its row in
the L2 cache: memory sees the logits once and their gradient once. Exponentials are powers of two, which is what the
processors have.

Shapes: M tokens, V vocabulary, C logits at a time.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOG2E = math.log2(math.e)
# Below any logit; finite, since the difference of two infinities is not a number.
LOWEST = -1e30


class Tile(NamedTuple):
    """What a program does at a time, and how."""

    logits: int
    warps: int


# The fastest of those measured on an H200 with 128,256 logits.
MEASURED = Tile(16384, 32)
# Of the vocabulary, so that rows begin where loads of 16 bytes may.
MULTIPLE = 64


def per_token(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float,
    dtype: np.dtype,
    tile: Tile = MEASURED,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    V = logits.shape[-1]
    M = logits.size // V
    size = min(tile.logits, 1 << (V.bit_length() - 1))
    losses_M, nll_M, d_logits_MV = pl.pallas_call(
        partial(_kernel, size=size, z_loss=z_loss),
        grid=(M,),
        out_shape=[
            jax.ShapeDtypeStruct((M,), jnp.float32),
            jax.ShapeDtypeStruct((M,), jnp.float32),
            jax.ShapeDtypeStruct((M, V), dtype),
        ],
        input_output_aliases={0: 2} if logits.dtype == dtype else {},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="cross_entropy",
    )(logits.reshape(M, V), targets.reshape(M), weights.reshape(M).astype(jnp.float32))
    return losses_M.reshape(targets.shape), nll_M.reshape(targets.shape), d_logits_MV.reshape(logits.shape)


def _kernel(
    logits_ref: Any,
    targets_ref: Any,
    weights_ref: Any,
    losses_ref: Any,
    nll_ref: Any,
    d_logits_ref: Any,
    *,
    size: int,
    z_loss: float,
) -> None:
    """The last piece ends where the row does and begins within the one before it, whose part of it is masked."""
    V = logits_ref.shape[1]
    row = pl.program_id(0)
    target, weight = targets_ref[row], weights_ref[row]
    is_known = (target >= 0) & (target < V)
    own = logits_ref[row, jnp.where(is_known, target, 0)].astype(jnp.float32)
    at_C = jnp.arange(size)

    def piece(step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where a piece starts, its logits in units of log 2, and which of them are new."""
        start = jnp.minimum(step * size, V - size)
        scaled_C = logits_ref[row, pl.ds(start, size)].astype(jnp.float32) * LOG2E
        return start, scaled_C, start + at_C >= step * size

    def add(step: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest, sums_C = carried
        _, scaled_C, is_new_C = piece(step)
        scaled_C = jnp.where(is_new_C, scaled_C, LOWEST)
        larger = jnp.maximum(largest, jnp.max(scaled_C))
        return larger, sums_C * jnp.exp2(largest - larger) + jnp.exp2(scaled_C - larger)

    steps = pl.cdiv(V, size)
    largest, sums_C = jax.lax.fori_loop(0, steps, add, (jnp.float32(LOWEST), jnp.zeros((size,), jnp.float32)))
    normaliser = largest + jnp.log2(jnp.sum(sums_C))
    total = normaliser / LOG2E
    nll = total - jnp.where(is_known, own, 0.0)
    nll_ref[row] = nll
    losses_ref[row] = nll + z_loss * total * total
    slope = weight * (1 + 2 * z_loss * total)

    def write(step: jax.Array, _: None) -> None:
        start, scaled_C, is_new_C = piece(step)
        d_C = slope * jnp.exp2(scaled_C - normaliser) - jnp.where(start + at_C == target, weight, 0.0)
        plt.store(d_logits_ref.at[row, pl.ds(start, size)], d_C.astype(d_logits_ref.dtype), mask=is_new_C)

    jax.lax.fori_loop(0, steps, write, None)
