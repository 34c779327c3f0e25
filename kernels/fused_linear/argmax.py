"""The argmax over the outputs of a matmul of a few rows, for GPUs, in Pallas for Triton.

Programs stream the weights as in `small_batch` and keep one output per row, so the logits of a large vocabulary are not
written.

Shapes: M rows, N outputs, K inputs, G groups of outputs.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.fused_linear.small_batch import LEAST_ROWS, MOST_ROWS, Tile, stream_weights
from maxhydra.kernels.tiles import power_of_two_divisor

# Number of outputs that keeps all multiprocessors busy.
MANY = 16384


def choose_tile(N: int, K: int) -> Tile:
    """The fastest tile measured on an H200 for the head of Llama 3.2 1B, reduced to divisors of the sizes."""
    outputs, inputs = power_of_two_divisor(N), power_of_two_divisor(K)
    return Tile(min(128, outputs), min(64, inputs), 1, is_left=False, warps=4, stages=4)


def is_supported(M: int, N: int, K: int, dtype: str) -> bool:
    """Whether the kernels support these sizes on the current devices."""
    fits = (
        LEAST_ROWS <= M <= MOST_ROWS and N >= MANY and power_of_two_divisor(N) >= 64 and power_of_two_divisor(K) >= 64
    )
    return jax.default_backend() == "gpu" and fits and N * K < 2**31 and dtype == "bfloat16"


def matmul_argmax(
    x_MK: jax.Array, weight_NK: jax.Array, dtype: np.dtype, *, interpret: bool, tile: Tile | None = None
) -> tuple[jax.Array, jax.Array]:
    """The largest output of each row, rounded to `dtype`, as float32 [M], and its index [M], the first if several.

    Infinite if any output is NaN.
    """
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    tile = tile or choose_tile(N, K)
    G = N // tile.outputs
    group_spec = pl.BlockSpec((M, None), lambda g: (0, g))
    top_MG, index_MG = pl.pallas_call(
        partial(_group_kernel, tile=tile, dtype=dtype),
        grid=(G,),
        in_specs=[
            pl.BlockSpec((M, K), lambda g: (0, 0)),
            pl.BlockSpec((1, tile.outputs, K), lambda g: (0, g, 0)),
        ],
        out_specs=[group_spec, group_spec],
        out_shape=[jax.ShapeDtypeStruct((M, G), jnp.float32), jax.ShapeDtypeStruct((M, G), jnp.int32)],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="argmax_of_groups",
    )(x_MK, weight_NK[None])
    row, scalar = pl.BlockSpec((None, G), lambda m: (m, 0)), pl.BlockSpec((None,), lambda m: (m,))
    top_M, index_M = pl.pallas_call(
        _final_kernel,
        grid=(M,),
        in_specs=[row, row],
        out_specs=[scalar, scalar],
        out_shape=[jax.ShapeDtypeStruct((M,), jnp.float32), jax.ShapeDtypeStruct((M,), jnp.int32)],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="argmax_final",
    )(top_MG, index_MG)
    return top_M, index_M


def _group_kernel(x_ref: Any, weight_ref: Any, top_ref: Any, index_ref: Any, *, tile: Tile, dtype: np.dtype) -> None:
    (out,), is_row = stream_weights(x_ref, weight_ref, tile)
    axis, down = 0 if tile.is_left else 1, pl.ds(0, is_row.shape[0])
    out = out.astype(dtype).astype(jnp.float32)
    out = jnp.where(out == out, out, jnp.inf)
    index = jnp.argmax(out, axis=axis).astype(jnp.int32) + pl.program_id(0) * tile.outputs
    plt.store(top_ref.at[down], jnp.max(out, axis=axis), mask=is_row)
    plt.store(index_ref.at[down], index, mask=is_row)


def _final_kernel(tops_ref: Any, indices_ref: Any, top_ref: Any, index_ref: Any) -> None:
    G = tops_ref.shape[0]
    groups = 1 << (G - 1).bit_length()
    here, is_group = pl.ds(0, groups), jnp.arange(groups) < G
    tops = plt.load(tops_ref.at[here], mask=is_group, other=-jnp.inf)
    indices = plt.load(indices_ref.at[here], mask=is_group, other=jnp.iinfo(jnp.int32).max)
    top = jnp.max(tops)
    top_ref[...] = top
    index_ref[...] = jnp.min(jnp.where(tops == top, indices, jnp.iinfo(jnp.int32).max))
