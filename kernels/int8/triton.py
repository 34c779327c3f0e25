"""The product of a few rows with int8 weights for GPUs, in Pallas for Triton: codes are widened on their way from memory
to the sum. One row is multiplied and summed; several go through the matrix unit, with the weight as its left operand,
which may come from registers.

Shapes: M rows, N outputs, K inputs.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Rows up to which reading the weights takes longer than the product.
FEW_ROWS = 64
# The matrix unit takes no fewer rows.
LEAST_ROWS = 16
DTYPES = ("bfloat16", "float16", "float32")


class Tile(NamedTuple):
    """What a program does at a time."""

    outputs: int
    inputs: int
    warps: int
    stages: int


def tile(M: int, N: int, K: int) -> Tile:
    """The fastest of those measured on an H200 for shapes of Llama 3.2 1B, cut down to what divides the sizes."""
    inputs = _power_of_two_in(K)
    if M == 1:
        return Tile(outputs=min(8, _power_of_two_in(N)), inputs=min(2048, inputs), warps=4, stages=1)
    return Tile(outputs=min(32, _power_of_two_in(N)), inputs=min(128, inputs), warps=4, stages=4)


def can_serve(M: int, N: int, K: int, dtype: str) -> bool:
    """Whether the kernel takes these sizes on the devices there are."""
    fits = M <= FEW_ROWS and _power_of_two_in(N) >= LEAST_ROWS and _power_of_two_in(K) >= 64 and N * K < 2**31
    return jax.default_backend() == "gpu" and fits and dtype in DTYPES


def product(
    x_MK: jax.Array,
    codes_NK: jax.Array,
    scales_N: jax.Array,
    dtype: np.dtype,
    *,
    interpret: bool,
    by: Tile | None = None,
) -> jax.Array:
    """x times the transpose of codes times scales."""
    (M, K), N = x_MK.shape, codes_NK.shape[0]
    by = by or tile(M, N, K)
    rows = M if M == 1 else max(LEAST_ROWS, 1 << (M - 1).bit_length())
    body = partial(_one_row if M == 1 else _few_rows, step=by.inputs, rows=rows)
    return pl.pallas_call(
        body,
        grid=(N // by.outputs,),
        in_specs=[
            pl.BlockSpec((M, K), lambda n: (0, 0)),
            pl.BlockSpec((by.outputs, K), lambda n: (n, 0)),
            pl.BlockSpec((by.outputs,), lambda n: (n,)),
        ],
        out_specs=pl.BlockSpec((M, by.outputs), lambda n: (0, n)),
        out_shape=jax.ShapeDtypeStruct((M, N), dtype),
        compiler_params=plt.CompilerParams(num_warps=by.warps, num_stages=by.stages),
        interpret=interpret,
        name="int8_product",
    )(x_MK, codes_NK, scales_N)


def _one_row(x_ref: Any, codes_ref: Any, scales_ref: Any, out_ref: Any, *, step: int, rows: int) -> None:
    """Parts are written out, so that all of them are on their way from memory at once."""
    N, K = codes_ref.shape
    sums_NK = jnp.zeros((N, step), jnp.float32)
    for start in range(0, K, step):
        x_K = x_ref[0, pl.ds(start, step)].astype(jnp.float32)
        sums_NK += codes_ref[:, pl.ds(start, step)].astype(jnp.float32) * x_K[None, :]
    out_ref[0, :] = (jnp.sum(sums_NK, axis=1) * scales_ref[...]).astype(out_ref.dtype)


def _few_rows(x_ref: Any, codes_ref: Any, scales_ref: Any, out_ref: Any, *, step: int, rows: int) -> None:
    M, K = x_ref.shape
    N = codes_ref.shape[0]
    is_row, down = jnp.arange(rows) < M, pl.ds(0, rows)

    def add(part: jax.Array, sums_NM: jax.Array) -> jax.Array:
        across = pl.ds(part * step, step)
        x_MK = plt.load(x_ref.at[down, across], mask=is_row[:, None], other=0.0)
        return sums_NM + jnp.dot(codes_ref[:, across].astype(x_MK.dtype), x_MK.T, preferred_element_type=jnp.float32)

    sums_NM = jax.lax.fori_loop(0, K // step, add, jnp.zeros((N, rows), jnp.float32))
    out_MN = (sums_NM * scales_ref[...][:, None]).T.astype(out_ref.dtype)
    plt.store(out_ref.at[down, :], out_MN, mask=is_row[:, None])


def _power_of_two_in(size: int) -> int:
    """The largest power of two that divides the size."""
    return math.gcd(size, 1 << 30)
