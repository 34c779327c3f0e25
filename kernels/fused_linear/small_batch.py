"""Matmul of a few rows for GPUs, in Pallas for Triton: weights are streamed through the tensor cores.

A program computes some outputs, or with few outputs a split of their inputs (split-K).

Shapes: M rows, N outputs, K inputs, P split-K parts, H = 2 if outputs come in pairs of gate and value, else 1.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.fused_linear.epilogue import Activation, Epilogue
from maxhydra.kernels.tiles import power_of_two_divisor

# Number of rows up to which reading the weights takes longer than the arithmetic; fewest rows of the tensor cores.
MOST_ROWS, LEAST_ROWS = 64, 16
# Number of outputs up to which split-K is used, and its parts; with two parts, the number of outputs up to which
# returning partial sums pays off for a kernel that reads them anyway.
FEW, PARTS = 2048, 4
SOME, HALVES = 4096, 2


class Tile(NamedTuple):
    """Work of a program per step."""

    outputs: int
    inputs: int
    parts: int
    """Split-K: programs that share the inputs of an output."""
    is_left: bool
    """Whether the weight is the left operand, of which the tensor cores take 64 rows at a time."""
    warps: int
    stages: int


def choose_tile(N: int, K: int, H: int) -> Tile:
    """The fastest tile measured on an H200 for shapes of Llama 3.2 1B, reduced to divisors of the sizes."""
    outputs, inputs = power_of_two_divisor(N), power_of_two_divisor(K)
    if H == 2:
        return Tile(min(64, outputs), min(128, inputs), 1, is_left=True, warps=4, stages=4)
    parts = PARTS if N <= FEW else HALVES
    return Tile(min(64, outputs), min(64, inputs // parts), parts, is_left=True, warps=4, stages=8)


def is_supported(M: int, N: int, K: int, dtype: str, *, is_gated: bool, is_summed: bool = True) -> bool:
    """Whether the kernel supports these sizes on the current devices and is worth it.

    With many ungated outputs, the library GEMM is as fast. `is_summed`: whether a separate kernel must reduce the
    split-K parts.
    """
    fits = (
        1 < M <= MOST_ROWS
        and power_of_two_divisor(N) >= 64
        and power_of_two_divisor(K) >= 64 * PARTS
        and 2 * N * K < 2**31
    )
    is_worth_it = is_gated or (N <= FEW if is_summed else N <= SOME)
    return jax.default_backend() == "gpu" and fits and dtype == "bfloat16" and is_worth_it


def small_batch_linear(
    x_MK: jax.Array,
    weight_NK: jax.Array,
    epilogue: Epilogue,
    dtype: np.dtype,
    *,
    interpret: bool,
    tile: Tile | None = None,
) -> jax.Array:
    """[M, N], as `fused_linear` in the package.

    The norm and the split-K reduction are left to XLA, which fuses the sum, the residual and the norm that follows.
    """
    x_MK = x_MK if epilogue.norm is None else epilogue.norm(x_MK)
    parts_PMN = partial_sums(x_MK, weight_NK, epilogue, dtype, interpret=interpret, tile=tile)
    if epilogue.residual_MN is None:
        return parts_PMN[0] if parts_PMN.shape[0] == 1 else jnp.sum(parts_PMN, axis=0).astype(dtype)
    return (jnp.sum(parts_PMN, axis=0, dtype=jnp.float32) + epilogue.residual_MN.astype(jnp.float32)).astype(dtype)


def partial_sums(
    x_MK: jax.Array,
    weight_NK: jax.Array,
    epilogue: Epilogue,
    dtype: np.dtype,
    *,
    interpret: bool,
    tile: Tile | None = None,
) -> jax.Array:
    """[P, M, N]: partial sums of x times the transpose of the weight, gated if requested.

    In float32 if a sum is still to be applied.
    """
    H, (M, K) = 1 if epilogue.activation is None else 2, x_MK.shape
    N = weight_NK.shape[0] // H
    tile = tile or choose_tile(N, K, H)
    size, is_whole = K // tile.parts, tile.parts == 1 and epilogue.residual_MN is None
    return pl.pallas_call(
        partial(_kernel, tile=tile, activation=epilogue.activation),
        grid=(N // tile.outputs, tile.parts),
        in_specs=[
            pl.BlockSpec((M, size), lambda n, p: (0, p)),
            pl.BlockSpec((H, tile.outputs, size), lambda n, p: (0, n, p)),
        ],
        out_specs=pl.BlockSpec((None, M, tile.outputs), lambda n, p: (p, 0, n)),
        out_shape=jax.ShapeDtypeStruct((tile.parts, M, N), dtype if is_whole else jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="small_batch_matmul",
    )(x_MK, weight_NK.reshape(H, N, K))


def _kernel(x_ref: Any, weight_ref: Any, out_ref: Any, *, tile: Tile, activation: Activation | None) -> None:
    sums, is_row = stream_weights(x_ref, weight_ref, tile)
    out = sums[0] if activation is None else activation(sums[0]) * sums[1]
    out_MN, rows, M = (out.T if tile.is_left else out).astype(out_ref.dtype), is_row.shape[0], x_ref.shape[0]
    plt.store(out_ref.at[pl.ds(0, rows), :], out_MN, mask=None if rows == M else is_row[:, None])


def stream_weights(x_ref: Any, weight_ref: Any, tile: Tile) -> tuple[list[jax.Array], jax.Array]:
    """The matmul of each half of the weights with the rows in float32, and the mask of valid rows.

    [N, M] if the weight is on the left, else [M, N]; M is padded to a size that the tensor cores support.
    """
    M = x_ref.shape[0]
    H, N, K = weight_ref.shape
    rows = max(LEAST_ROWS, 1 << (M - 1).bit_length())
    is_row, down = jnp.arange(rows) < M, pl.ds(0, rows)

    def add(part: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        across = pl.ds(part * tile.inputs, tile.inputs)
        x_MK = plt.load(
            x_ref.at[down, across], mask=None if rows == M else is_row[:, None], other=None if rows == M else 0.0
        )
        weights = [weight_ref[half, :, across] for half in range(H)]
        pairs = [(weight_NK, x_MK.T) if tile.is_left else (x_MK, weight_NK.T) for weight_NK in weights]
        terms = [jnp.dot(*pair, preferred_element_type=jnp.float32) for pair in pairs]
        return [total + term for total, term in zip(sums, terms, strict=True)]

    zeros = jnp.zeros((N, rows) if tile.is_left else (rows, N), jnp.float32)
    return jax.lax.fori_loop(0, K // tile.inputs, add, [zeros] * H), is_row
