"""The product of a few rows with int8 weights for GPUs, in Pallas for Triton: codes are widened between memory and sum.

One row is multiplied and summed; several go through the matrix unit, with the weight as its left operand,
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
# Outputs from which on programs are many without dividing inputs, and inputs at least that a program sums.
MANY, LEAST_INPUTS = 8192, 64
DTYPES = ("bfloat16", "float32")

# Four codes to floats a, b, c, d. The processors turn 16 integers a cycle into floats, too few for the speed of memory;
# so a code plus 128 becomes the last byte of 2^23 as a float, from which 2^23 + 128 is taken.
WIDEN = """{
  .reg .b32 u, a, b, c, d;
  xor.b32 u, CODES, 0x80808080;
  prmt.b32 a, u, 0x4B000000, 0x7650;
  prmt.b32 b, u, 0x4B000000, 0x7651;
  prmt.b32 c, u, 0x4B000000, 0x7652;
  prmt.b32 d, u, 0x4B000000, 0x7653;
  add.f32 a, a, 0fCB000080;
  add.f32 b, b, 0fCB000080;
  add.f32 c, c, 0fCB000080;
  add.f32 d, d, 0fCB000080;
  USE
}"""
# As they are; as bfloat16, their upper halves, since a code has eight bits and so has a bfloat16; or times a number and
# added to another, in one instruction that the compiler would make two of.
AS_FLOAT32 = "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;", "=f,=f,=f,=f,r"
AS_BFLOAT16 = "prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632;", "=r,=r,r"
TIMES_ADDED = (
    "fma.rn.f32 $0, a, $5, $9; fma.rn.f32 $1, b, $6, $10; fma.rn.f32 $2, c, $7, $11; fma.rn.f32 $3, d, $8, $12;",
    "=f,=f,=f,=f,r,f,f,f,f,f,f,f,f",
)


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
    outputs, inputs = _power_of_two_in(N), _power_of_two_in(K)
    if M == 1 and N > MANY:
        return Tile(outputs=min(4, outputs), inputs=min(512, inputs), parts=1, warps=1, stages=1)
    if M == 1:
        return Tile(outputs=min(8, outputs), inputs=min(512 if K < MANY else 2048, inputs), parts=1, warps=8, stages=1)
    if N > MANY and M > LEAST_ROWS:
        return Tile(outputs=min(128, outputs), inputs=min(128, inputs), parts=1, warps=4, stages=4)
    if N > MANY:
        return Tile(outputs=min(32, outputs), inputs=min(256, inputs), parts=1, warps=4, stages=4)
    parts = min(8 if K >= MANY and M > LEAST_ROWS else 4, inputs // LEAST_INPUTS)
    step = 128 if M > LEAST_ROWS else 256
    return Tile(outputs=min(64, outputs), inputs=min(step, inputs // parts), parts=parts, warps=4, stages=3)


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
    """Parts are written out, so that many of them are on their way from memory at once."""
    N, K = codes_ref.shape
    sums_NK = jnp.zeros((N, step), jnp.float32)
    for start in range(0, K, step):
        x_K, codes_NK = x_ref[0, pl.ds(start, step)].astype(jnp.float32), codes_ref[:, pl.ds(start, step)]
        x_NK = jnp.broadcast_to(x_K[None, :], (N, step))
        sums_NK = (
            codes_NK * x_NK + sums_NK if interpret else _assembled(TIMES_ADDED, jnp.float32, codes_NK, x_NK, sums_NK)
        )
    out_ref[0, :] = (jnp.sum(sums_NK, axis=1) * scales_ref[...]).astype(out_ref.dtype)


def _few_rows(x_ref: Any, codes_ref: Any, scales_ref: Any, out_ref: Any, *, step: int, interpret: bool) -> None:
    M, K = x_ref.shape
    N, rows = codes_ref.shape[0], max(LEAST_ROWS, 1 << (M - 1).bit_length())
    is_row, down = jnp.arange(rows) < M, pl.ds(0, rows)
    widen = AS_BFLOAT16 if x_ref.dtype == jnp.bfloat16 else AS_FLOAT32

    def add(part: jax.Array, sums_NM: jax.Array) -> jax.Array:
        across = pl.ds(part * step, step)
        x_MK = plt.load(x_ref.at[down, across], mask=is_row[:, None], other=0.0)
        codes_NK = codes_ref[:, across]
        weight_NK = codes_NK.astype(x_MK.dtype) if interpret else _assembled(widen, x_MK.dtype, codes_NK)
        return sums_NM + jnp.dot(weight_NK, x_MK.T, preferred_element_type=jnp.float32)

    sums_NM = jax.lax.fori_loop(0, K // step, add, jnp.zeros((N, rows), jnp.float32))
    out_MN = (sums_NM * scales_ref[...][:, None]).T.astype(out_ref.dtype)
    plt.store(out_ref.at[down, :], out_MN, mask=is_row[:, None])


def _assembled(use: tuple[str, str], dtype: Any, codes: jax.Array, *others: jax.Array) -> jax.Array:
    """What instructions make of codes, four at a time."""
    instructions, constraints = use
    (made,) = plt.elementwise_inline_asm(
        WIDEN.replace("CODES", f"${constraints.count('=')}").replace("USE", instructions),
        args=[codes, *others],
        constraints=constraints,
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return made


def _power_of_two_in(size: int) -> int:
    """The largest power of two that divides the size."""
    return math.gcd(size, 1 << 30)
