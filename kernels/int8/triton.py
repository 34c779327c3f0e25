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
DTYPES = ("bfloat16", "float32")

# Four codes to floats. The processors turn 16 integers a cycle into floats, too few for the speed of memory; so a code
# plus 128 becomes the last byte of 2^23 as a float, from which 2^23 + 128 is taken.
WIDEN = """{
  .reg .b32 u, a, b, c, d;
  xor.b32 u, SOURCE, 0x80808080;
  prmt.b32 a, u, 0x4B000000, 0x7650;
  prmt.b32 b, u, 0x4B000000, 0x7651;
  prmt.b32 c, u, 0x4B000000, 0x7652;
  prmt.b32 d, u, 0x4B000000, 0x7653;
  add.f32 a, a, 0fCB000080;
  add.f32 b, b, 0fCB000080;
  add.f32 c, c, 0fCB000080;
  add.f32 d, d, 0fCB000080;
  STORE
}"""
STORE = {
    "float32": ("mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;", "=f,=f,=f,=f,r"),
    # The upper halves: a code has eight bits, and so has a bfloat16.
    "bfloat16": ("prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632;", "=r,=r,r"),
}


class Tile(NamedTuple):
    """What a program does at a time."""

    outputs: int
    inputs: int
    parts: int
    """Programs that share the inputs of an output."""
    warps: int
    stages: int


def tile(M: int, N: int, K: int) -> Tile:
    """The fastest of those measured on an H200 for shapes of Llama 3.2 1B, cut down to what divides the sizes."""
    inputs = _power_of_two_in(K)
    if M == 1:
        return Tile(outputs=min(8, _power_of_two_in(N)), inputs=min(2048, inputs), parts=1, warps=4, stages=1)
    return Tile(outputs=min(32, _power_of_two_in(N)), inputs=min(128, inputs), parts=1, warps=4, stages=4)


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
    size, is_whole = K // by.parts, by.parts == 1
    out_PMN = pl.pallas_call(
        partial(_one_row if M == 1 else _few_rows, step=by.inputs, interpret=interpret),
        grid=(N // by.outputs, by.parts),
        in_specs=[
            pl.BlockSpec((M, size), lambda n, p: (0, p)),
            pl.BlockSpec((by.outputs, size), lambda n, p: (n, p)),
            pl.BlockSpec((by.outputs,), lambda n, p: (n,)),
        ],
        out_specs=pl.BlockSpec((None, M, by.outputs), lambda n, p: (p, 0, n)),
        out_shape=jax.ShapeDtypeStruct((by.parts, M, N), dtype if is_whole else jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=by.warps, num_stages=by.stages),
        interpret=interpret,
        name="int8_product",
    )(x_MK, codes_NK, scales_N)
    return out_PMN[0] if is_whole else jnp.sum(out_PMN, axis=0).astype(dtype)


def _one_row(x_ref: Any, codes_ref: Any, scales_ref: Any, out_ref: Any, *, step: int, interpret: bool) -> None:
    """All codes are on their way from memory before the first is used."""
    N, K = codes_ref.shape
    parts = [pl.ds(start, step) for start in range(0, K, step)]
    codes = [codes_ref[:, part] for part in parts]
    sums_NK = jnp.zeros((N, step), jnp.float32)
    for part, codes_NK in zip(parts, codes, strict=True):
        x_K = x_ref[0, part].astype(jnp.float32)
        sums_NK += _widened(codes_NK, jnp.float32, interpret=interpret) * x_K[None, :]
    out_ref[0, :] = (jnp.sum(sums_NK, axis=1) * scales_ref[...]).astype(out_ref.dtype)


def _few_rows(x_ref: Any, codes_ref: Any, scales_ref: Any, out_ref: Any, *, step: int, interpret: bool) -> None:
    M, K = x_ref.shape
    N, rows = codes_ref.shape[0], max(LEAST_ROWS, 1 << (M - 1).bit_length())
    is_row, down = jnp.arange(rows) < M, pl.ds(0, rows)

    def add(part: jax.Array, sums_NM: jax.Array) -> jax.Array:
        across = pl.ds(part * step, step)
        x_MK = plt.load(x_ref.at[down, across], mask=is_row[:, None], other=0.0)
        weight_NK = _widened(codes_ref[:, across], x_MK.dtype, interpret=interpret)
        return sums_NM + jnp.dot(weight_NK, x_MK.T, preferred_element_type=jnp.float32)

    sums_NM = jax.lax.fori_loop(0, K // step, add, jnp.zeros((N, rows), jnp.float32))
    out_MN = (sums_NM * scales_ref[...][:, None]).T.astype(out_ref.dtype)
    plt.store(out_ref.at[down, :], out_MN, mask=is_row[:, None])


def _widened(codes: jax.Array, dtype: Any, *, interpret: bool) -> jax.Array:
    if interpret:
        return codes.astype(dtype)
    store, constraints = STORE[jnp.dtype(dtype).name]
    asm = WIDEN.replace("SOURCE", f"${constraints.count('=')}").replace("STORE", store)
    shape = jax.ShapeDtypeStruct(codes.shape, dtype)
    (wide,) = plt.elementwise_inline_asm(
        asm, args=[codes], constraints=constraints, pack=4, result_shape_dtypes=[shape]
    )
    return wide


def _power_of_two_in(size: int) -> int:
    """The largest power of two that divides the size."""
    return math.gcd(size, 1 << 30)
