"""Matmul of a few rows with int8 weights for GPUs, in Pallas for Triton: codes are converted in registers.

They go through the tensor cores as the left operand, which may come from registers. A single row is a multiply and a
sum instead (`kernels/fused_linear/gemv.py`).

Shapes: M rows, N outputs, K inputs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.ptx import AS_BFLOAT16, AS_FLOAT32, convert_int8
from maxhydra.kernels.tiles import power_of_two_divisor

# Number of rows up to which reading the weights takes longer than the arithmetic.
FEW_ROWS = 64
# The tensor cores need at least this many rows.
LEAST_ROWS = 16
# Number of outputs from which there are enough programs without split-K, and the fewest inputs of a split.
MANY, LEAST_INPUTS = 8192, 64
DTYPES = ("bfloat16", "float32")


class Tile(NamedTuple):
    """Work of a program per step, and launch parameters."""

    outputs: int
    inputs: int
    parts: int
    """Split-K: programs that share the inputs of an output."""
    warps: int
    stages: int


def choose_tile(M: int, N: int, K: int) -> Tile:
    """The fastest tile measured on an H200 for shapes of Llama 3.2 1B, reduced to divisors of the sizes."""
    outputs, inputs = power_of_two_divisor(N), power_of_two_divisor(K)
    if N > MANY and M > LEAST_ROWS:
        return Tile(outputs=min(128, outputs), inputs=min(128, inputs), parts=1, warps=4, stages=4)
    if N > MANY:
        return Tile(outputs=min(32, outputs), inputs=min(256, inputs), parts=1, warps=4, stages=4)
    parts = min(8 if K >= MANY and M > LEAST_ROWS else 4, inputs // LEAST_INPUTS)
    step = 128 if M > LEAST_ROWS else 256
    return Tile(outputs=min(64, outputs), inputs=min(step, inputs // parts), parts=parts, warps=4, stages=3)


def is_supported(M: int, N: int, K: int, dtype: str) -> bool:
    """Whether the kernel supports these sizes on the current devices."""
    fits = (
        1 < M <= FEW_ROWS and power_of_two_divisor(N) >= LEAST_ROWS and power_of_two_divisor(K) >= 64 and N * K < 2**31
    )
    return jax.default_backend() == "gpu" and fits and dtype in DTYPES


def small_batch_matmul(
    x_MK: jax.Array,
    codes_NK: jax.Array,
    scales_N: jax.Array,
    dtype: np.dtype,
    *,
    interpret: bool,
    tile: Tile | None = None,
) -> jax.Array:
    """x times the transpose of codes times scales."""
    (M, K), N = x_MK.shape, codes_NK.shape[0]
    tile = tile or choose_tile(M, N, K)
    size, is_whole = K // tile.parts, tile.parts == 1
    out_PMN = pl.pallas_call(
        partial(_kernel, step=tile.inputs, interpret=interpret),
        grid=(N // tile.outputs, tile.parts),
        in_specs=[
            pl.BlockSpec((M, size), lambda n, p: (0, p)),
            pl.BlockSpec((tile.outputs, size), lambda n, p: (n, p)),
            pl.BlockSpec((tile.outputs,), lambda n, p: (n,)),
        ],
        out_specs=pl.BlockSpec((None, M, tile.outputs), lambda n, p: (p, 0, n)),
        out_shape=jax.ShapeDtypeStruct((tile.parts, M, N), dtype if is_whole else jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="int8_weight_matmul",
    )(x_MK, codes_NK, scales_N)
    return out_PMN[0] if is_whole else jnp.sum(out_PMN, axis=0).astype(dtype)


def _kernel(x_ref: Any, codes_ref: Any, scales_ref: Any, out_ref: Any, *, step: int, interpret: bool) -> None:
    M, K = x_ref.shape
    N, rows = codes_ref.shape[0], max(LEAST_ROWS, 1 << (M - 1).bit_length())
    is_row, down = jnp.arange(rows) < M, pl.ds(0, rows)
    output = AS_BFLOAT16 if x_ref.dtype == jnp.bfloat16 else AS_FLOAT32

    def add(part: jax.Array, sums_NM: jax.Array) -> jax.Array:
        across = pl.ds(part * step, step)
        x_MK = plt.load(x_ref.at[down, across], mask=is_row[:, None], other=0.0)
        codes_NK = codes_ref[:, across]
        weight_NK = codes_NK.astype(x_MK.dtype) if interpret else convert_int8(output, x_MK.dtype, codes_NK)
        return sums_NM + jnp.dot(weight_NK, x_MK.T, preferred_element_type=jnp.float32)

    sums_NM = jax.lax.fori_loop(0, K // step, add, jnp.zeros((N, rows), jnp.float32))
    out_MN = (sums_NM * scales_ref[...][:, None]).T.astype(out_ref.dtype)
    plt.store(out_ref.at[down, :], out_MN, mask=is_row[:, None])
