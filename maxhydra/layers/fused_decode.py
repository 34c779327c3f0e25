"""Projections through the fused_linear kernels, which apply norm, gate and residual sum in the same launch.

Available for weights that are laid out for decoding (`Layout.joined`), on one device. A projection with a bias, an
active adapter or rounded operands is not covered and runs as an ordinary matmul.

B batch, T tokens, D residual stream; M rows, K inputs, N outputs of a matmul, P partial sums.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.kernels.fused_linear import (
    Activation,
    Epilogue,
    fused_linear,
    matmul_add_norm,
    prefers_fusion,
    split_k_matmul,
    supports_swiglu,
)
from maxhydra.kernels.fused_linear import NormParams as NormParams
from maxhydra.kernels.matmul import Layout
from maxhydra.layers.context import Context
from maxhydra.layers.linear import Linear, are_alike
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.quant.int8 import Int8, concatenate_int8


def can_fuse(projections: Sequence[Linear], x_BTD: jax.Array, ctx: Context) -> bool:
    """Whether the decode kernels cover these projections, fused into one, for the number of rows in x."""
    first, rows = projections[0], math.prod(x_BTD.shape[:2])
    if not _are_fusable(projections, ctx):
        return False
    if isinstance(first.kernel, Int8):
        return prefers_fusion(rows, jnp.int8)
    return isinstance(first.kernel, nnx.Param) and prefers_fusion(rows, first.matmul_spec.compute)


def can_gate(gate: Linear, value: Linear, x_BTD: jax.Array, ctx: Context, activation: Activation) -> bool:
    """Whether the prefill kernel covers activation(gate(x)) * value(x) for the number of rows in x."""
    if not (_are_fusable((gate, value), ctx) and isinstance(gate.kernel, nnx.Param)):
        return False
    *rows, inputs = x_BTD.shape
    return supports_swiglu(math.prod(rows), gate.width, inputs, gate.matmul_spec.compute, activation)


def _are_fusable(projections: Sequence[Linear], ctx: Context) -> bool:
    first = projections[0]
    is_bare = all(linear.bias is None and (linear.lora is None or not ctx.is_adapted) for linear in projections)
    is_bare = is_bare and are_alike(projections) and not first.is_rounded
    is_laid_out = first.matmul_spec.is_fused and first.matmul_spec.layout is Layout.joined
    return is_laid_out and is_bare and ctx.sharder.mesh.size == 1


def fused_projection(
    projections: Sequence[Linear],
    x: jax.Array,
    *,
    norm: RMSNorm | None = None,
    activation: Activation | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """[B, T, ...] projections of norm(x), concatenated along their first output dimension, by one kernel.

    With an activation the first half of the outputs gates the second. `residual` is added to the result.
    """
    first = projections[0]
    packed = [linear.kernel.parts for linear in projections if isinstance(linear.kernel, Int8)]
    if packed:
        fused = concatenate_int8(packed)
        kernel, scales_N = fused.codes, fused.scales.reshape(-1)
    else:
        kernel, scales_N = _concatenated_kernel(projections), None
    width, *rest = kernel.shape[first.inputs :]
    weight_NK = _outputs_first(kernel, first.inputs)
    epilogue = Epilogue(
        norm=None if norm is None else norm.kernel_params,
        activation=activation,
        residual_MN=None if residual is None else residual.reshape(-1, residual.shape[-1]),
    )
    out_MN = fused_linear(x.reshape(-1, weight_NK.shape[1]), weight_NK, scales_N, epilogue, dtype=x.dtype)
    return out_MN.reshape(*x.shape[:2], width if activation is None else width // 2, *rest)


def project_norm(
    projections: Sequence[Linear],
    x_BTD: jax.Array,
    norm: RMSNorm,
    normed_BTD: jax.Array | None,
    activation: Activation | None = None,
) -> jax.Array:
    """`fused_projection` of norm(x); `normed_BTD` is norm(x) if an earlier kernel computed it."""
    if normed_BTD is None:
        return fused_projection(projections, x_BTD, norm=norm, activation=activation)
    return fused_projection(projections, normed_BTD, activation=activation)


def project_norm_partial_sums(
    projections: Sequence[Linear], x_BTD: jax.Array, norm: RMSNorm, normed_BTD: jax.Array | None
) -> jax.Array:
    """[P, B, T, ...] partial sums of `project_norm`, for a kernel that adds them up as it reads them."""
    first = projections[0]
    if isinstance(first.kernel, Int8):
        return project_norm(projections, x_BTD, norm, normed_BTD)[None]
    kernel = _concatenated_kernel(projections)
    weight_NK = _outputs_first(kernel, first.inputs)
    normed_MK = (norm.kernel_params(x_BTD) if normed_BTD is None else normed_BTD).reshape(-1, weight_NK.shape[1])
    sums_PMN = split_k_matmul(normed_MK, weight_NK, dtype=x_BTD.dtype)
    return sums_PMN.reshape(-1, *x_BTD.shape[:2], *kernel.shape[first.inputs :])


def add_projection(
    projection: Linear, x: jax.Array, residual_BTD: jax.Array, *, next_norm: NormParams | None
) -> tuple[jax.Array, jax.Array | None]:
    """residual + projection(x), and `next_norm` of that.

    None instead of the norm if none is given, or with int8 weights, whose single row the next matmul normalizes.
    """
    weight_NK = plain_weight(projection)
    if next_norm is None or weight_NK is None:
        return fused_projection((projection,), x, residual=residual_BTD), None
    x_MK, residual_MN = x.reshape(-1, weight_NK.shape[1]), residual_BTD.reshape(-1, residual_BTD.shape[-1])
    out_MN, normed_MN = matmul_add_norm(x_MK, weight_NK, residual_MN, next_norm, dtype=x.dtype)
    return out_MN.reshape(residual_BTD.shape), normed_MN.reshape(residual_BTD.shape)


def plain_weight(projection: Linear) -> jax.Array | None:
    """[N, K] weight that `add_projection` reads, for the kernel before it to prefetch; None for int8 weights."""
    if isinstance(projection.kernel, Int8):
        return None
    return _outputs_first(projection.weight(projection.stored), projection.inputs)


def _concatenated_kernel(projections: Sequence[Linear]) -> jax.Array:
    kernels = [linear.weight(linear.stored) for linear in projections]
    return jnp.concatenate(kernels, axis=projections[0].inputs)


def _outputs_first(kernel: jax.Array, inputs: int) -> jax.Array:
    """A kernel [*inputs, *outputs] as a matrix [N, K]."""
    size = math.prod(kernel.shape[:inputs])
    return jnp.moveaxis(kernel, range(inputs), range(-inputs, 0)).reshape(-1, size)
