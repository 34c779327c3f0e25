"""Linear layers on a few rows with fused neighbours: a norm before the matmul, a gated activation or residual after it.

Decoding a token reads every weight once for a few rows. A kernel launch costs about 3 us before and after its memory
traffic, as long as the traffic of a small weight takes, so operations fused into the matmul are free.

Shapes: M rows, K inputs, N outputs; the weight has 2N rows for gated activations.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxhydra.kernels.fused_linear import (
    argmax,
    embed_norm,
    gemv,
    reference,
    small_batch,
    split_k_reduce,
    swiglu_prefill,
)
from maxhydra.kernels.fused_linear.epilogue import Activation, Epilogue, NormParams

__all__ = [
    "Activation",
    "Epilogue",
    "NormParams",
    "embed_and_norm",
    "fused_linear",
    "matmul_add_norm",
    "matmul_argmax",
    "prefers_fusion",
    "split_k_matmul",
    "supports_swiglu",
]


def prefers_fusion(rows: int, weight: DTypeLike) -> bool:
    """Whether these kernels beat separate operations for this many rows and this weight dtype.

    True for one row with int8 codes, which XLA would convert in a separate pass, and for a few rows with other weights,
    for which library GEMMs do not reach memory bandwidth.
    """
    return rows == 1 if weight == jnp.int8 else 1 < rows <= small_batch.MOST_ROWS


def supports_swiglu(rows: int, outputs: int, inputs: int, dtype: DTypeLike, activation: Activation) -> bool:
    """Whether one matmul with a fused gated activation is supported, and faster, for this many rows."""
    return swiglu_prefill.is_supported(rows, outputs, inputs, jnp.dtype(dtype).name, activation)


def fused_linear(
    x_MK: jax.Array, weight_NK: jax.Array, scales_N: jax.Array | None, epilogue: Epilogue, *, dtype: DTypeLike
) -> jax.Array:
    """[M, N]: x times the transpose of the weight, times the scales if given, with the fused norm and epilogue."""
    dtype, (count, inputs), is_gated = jnp.dtype(dtype), x_MK.shape, epilogue.activation is not None
    outputs, format = weight_NK.shape[0] // (2 if is_gated else 1), x_MK.dtype.name
    if epilogue.activation is not None and supports_swiglu(count, outputs, inputs, format, epilogue.activation):
        assert epilogue.norm is None and epilogue.residual_MN is None and scales_N is None
        return swiglu_prefill.swiglu_matmul(x_MK, weight_NK, epilogue.activation)
    if count == 1 and gemv.is_supported(outputs, inputs, format):
        return gemv.gemv_linear(x_MK, weight_NK, scales_N, epilogue, dtype, interpret=False)
    if scales_N is None and small_batch.is_supported(count, outputs, inputs, format, is_gated=is_gated):
        return small_batch.small_batch_linear(x_MK, weight_NK, epilogue, dtype, interpret=False)
    return reference.linear(x_MK, weight_NK, scales_N, epilogue, dtype)


def split_k_matmul(x_MK: jax.Array, weight_NK: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """[P, M, N]: split-K partial sums of x times the transpose of the weight, for a kernel that adds them as it reads.

    Their sum is to be rounded to `dtype`. They are float32, or already rounded if there is only one.
    """
    dtype, (count, inputs), outputs = jnp.dtype(dtype), x_MK.shape, weight_NK.shape[0]
    if small_batch.is_supported(count, outputs, inputs, x_MK.dtype.name, is_gated=False, is_summed=False):
        return small_batch.partial_sums(x_MK, weight_NK, Epilogue(), dtype, interpret=False)
    return fused_linear(x_MK, weight_NK, None, Epilogue(), dtype=dtype)[None]


def matmul_add_norm(
    x_MK: jax.Array, weight_NK: jax.Array, residual_MN: jax.Array, norm: NormParams, *, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """[M, N] twice: the residual + x times the transpose of the weight, and the norm of that."""
    dtype, (count, inputs), outputs = jnp.dtype(dtype), x_MK.shape, weight_NK.shape[0]
    epilogue = Epilogue(residual_MN=residual_MN)
    if small_batch.is_supported(
        count, outputs, inputs, x_MK.dtype.name, is_gated=False
    ) and split_k_reduce.is_supported(outputs):
        parts_PMN = small_batch.partial_sums(x_MK, weight_NK, epilogue, dtype, interpret=False)
        return split_k_reduce.reduce_add_norm(parts_PMN, residual_MN, norm, dtype, interpret=False)
    out_MN = fused_linear(x_MK, weight_NK, None, epilogue, dtype=dtype)
    return out_MN, norm(out_MN)


def embed_and_norm(table_VN: jax.Array, tokens_M: jax.Array, norm: NormParams) -> tuple[jax.Array, jax.Array] | None:
    """[M, N] twice: the tokens' rows of an embedding table, and their norms.

    None if the next kernel computes the norm itself, or no kernel supports the sizes.
    """
    if not embed_norm.is_supported(tokens_M.size, table_VN.shape[1], table_VN.dtype.name):
        return None
    return embed_norm.embed_and_norm(table_VN, tokens_M, norm, interpret=False)


def matmul_argmax(x_MK: jax.Array, weight_NK: jax.Array, *, dtype: DTypeLike) -> tuple[jax.Array, jax.Array] | None:
    """The largest output of each row of x times the transpose of the weight, rounded to `dtype`, and its index.

    The first index if there are several; the output is not finite if any is NaN. None if it is better to write all
    outputs and reduce them separately.
    """
    (count, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    if not argmax.is_supported(count, outputs, inputs, x_MK.dtype.name):
        return None
    return argmax.matmul_argmax(x_MK, weight_NK, jnp.dtype(dtype), interpret=False)
