"""Quantizes a matrix to FP8, plain and transposed, in one pass: for GPUs, in Pallas for Triton.

XLA's kernel for this reaches less than half of the memory bandwidth.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Side length of a program's tile.
TILE = 128


def is_supported(shape: tuple[int, ...]) -> bool:
    """Whether the kernel supports a matrix of this shape on the current devices."""
    return jax.default_backend() == "gpu" and all(side % TILE == 0 for side in shape)


def quantize(x_MK: jax.Array, scale: jax.Array, dtype: np.dtype, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """x / scale in the format, and its transpose."""
    M, K = x_MK.shape
    tile = pl.BlockSpec((TILE, TILE), lambda i, j: (i, j))
    transposed = pl.BlockSpec((TILE, TILE), lambda i, j: (j, i))
    values_MK, values_KM = pl.pallas_call(
        _kernel,
        grid=(M // TILE, K // TILE),
        in_specs=[tile, pl.BlockSpec((1,), lambda i, j: (0,))],
        out_specs=[tile, transposed],
        out_shape=[jax.ShapeDtypeStruct((M, K), dtype), jax.ShapeDtypeStruct((K, M), dtype)],
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="quantize_fp8",
    )(x_MK, (1 / scale).reshape(1))
    return values_MK, values_KM


def _kernel(x_ref: Any, inverse_ref: Any, out_ref: Any, transposed_ref: Any) -> None:
    values = (x_ref[...].astype(jnp.float32) * inverse_ref[0]).astype(out_ref.dtype)
    out_ref[...] = values
    transposed_ref[...] = values.T
