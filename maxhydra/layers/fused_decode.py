"""Projections of a few tokens together with what stands around them in a block: x + down(gate(norm(x))) in two kernels.

Only where weights lie together for decoding, on one device; what a projection has besides its kernel, such as a bias or
an adapter, it keeps to itself, and goes the way of other products.
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
    gates,
    parts_of_product,
    product_and_norm,
    suits,
)
from maxhydra.kernels.fused_linear import Norm as Factors
from maxhydra.kernels.matmul import Layout
from maxhydra.layers.context import Context
from maxhydra.layers.linear import Linear, are_alike
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.quant.int8 import Int8, side_by_side


def can_fuse(projections: Sequence[Linear], x_BTD: jax.Array, ctx: Context) -> bool:
    """Whether the rows of x meet these projections in kernels that do what stands around them."""
    first, rows = projections[0], math.prod(x_BTD.shape[:2])
    if not _are_fusable(projections, ctx):
        return False
    if isinstance(first.kernel, Int8):
        return suits(rows, jnp.int8)
    return isinstance(first.kernel, nnx.Param) and suits(rows, first.product.compute)


def can_gate(gate: Linear, value: Linear, x_BTD: jax.Array, ctx: Context, activation: Activation) -> bool:
    """Whether the rows of x, which are many, meet a gate and what it is for in one kernel."""
    if not (_are_fusable((gate, value), ctx) and isinstance(gate.kernel, nnx.Param)):
        return False
    *rows, inputs = x_BTD.shape
    return gates(math.prod(rows), gate.width, inputs, gate.product.compute, activation)


def _are_fusable(projections: Sequence[Linear], ctx: Context) -> bool:
    """Whether they lie as such kernels take them, and have nothing besides."""
    first = projections[0]
    is_bare = all(one.bias is None and (one.lora is None or not ctx.is_adapted) for one in projections)
    is_bare = is_bare and are_alike(projections) and not first.is_rounded
    is_asked = first.product.is_fused and first.product.layout is Layout.joined
    return is_asked and is_bare and ctx.sharder.mesh.size == 1


def fused(
    projections: Sequence[Linear],
    x: jax.Array,
    *,
    norm: RMSNorm | None = None,
    activation: Activation | None = None,
    onto: jax.Array | None = None,
) -> jax.Array:
    """[B, T, ...] by one kernel: what projections make of norm(x), side by side in the first dimension of their
    outputs. With an activation the first half of these is a gate for the second; `onto` is added."""
    first = projections[0]
    packed = [one.kernel.parts for one in projections if isinstance(one.kernel, Int8)]
    if packed:
        whole = side_by_side(packed)
        kernel, scales_N = whole.codes, whole.scales.reshape(-1)
    else:
        kernel, scales_N = _side_by_side(projections), None
    width, *rest = kernel.shape[first.inputs :]
    weight_NK = _outputs_first(kernel, first.inputs)
    around = Epilogue(
        norm=None if norm is None else norm.factors,
        activation=activation,
        onto_MN=None if onto is None else onto.reshape(-1, onto.shape[-1]),
    )
    out_MN = fused_linear(x.reshape(-1, weight_NK.shape[1]), weight_NK, scales_N, around, dtype=x.dtype)
    return out_MN.reshape(*x.shape[:2], width if activation is None else width // 2, *rest)


def fused_normed(
    projections: Sequence[Linear],
    x_BTD: jax.Array,
    norm: RMSNorm,
    ctx: Context,
    activation: Activation | None = None,
) -> jax.Array:
    """`fused` of norm(x), which the layer before may have made along."""
    if ctx.normed is None:
        return fused(projections, x_BTD, norm=norm, activation=activation)
    return fused(projections, ctx.normed, activation=activation)


def parts_of_normed(projections: Sequence[Linear], x_BTD: jax.Array, norm: RMSNorm, ctx: Context) -> jax.Array:
    """[P, B, T, ...]: parts whose sum is what `fused_normed` makes, for a kernel that adds them up as it reads them."""
    first = projections[0]
    if isinstance(first.kernel, Int8):
        return fused_normed(projections, x_BTD, norm, ctx)[None]
    kernel = _side_by_side(projections)
    weight_NK = _outputs_first(kernel, first.inputs)
    normed_MK = (norm.factors(x_BTD) if ctx.normed is None else ctx.normed).reshape(-1, weight_NK.shape[1])
    parts_PMN = parts_of_product(normed_MK, weight_NK, dtype=x_BTD.dtype)
    return parts_PMN.reshape(-1, *x_BTD.shape[:2], *kernel.shape[first.inputs :])


def added(
    projection: Linear, x: jax.Array, onto_BTD: jax.Array, *, then: Factors | None
) -> tuple[jax.Array, jax.Array | None]:
    """onto + projection(x), and the norm of that where it is asked for and does not come on the way to a product."""
    weight_NK = weight_read(projection)
    if then is None or weight_NK is None:
        return fused((projection,), x, onto=onto_BTD), None
    x_MK, onto_MN = x.reshape(-1, weight_NK.shape[1]), onto_BTD.reshape(-1, onto_BTD.shape[-1])
    stream_MN, normed_MN = product_and_norm(x_MK, weight_NK, onto_MN, then, dtype=x.dtype)
    return stream_MN.reshape(onto_BTD.shape), normed_MN.reshape(onto_BTD.shape)


def weight_read(projection: Linear) -> jax.Array | None:
    """[N, K] that `added` will read, for the kernel before it to ask for; None where that has another format."""
    if isinstance(projection.kernel, Int8):
        return None
    return _outputs_first(projection.weight(projection.kept), projection.inputs)


def _side_by_side(projections: Sequence[Linear]) -> jax.Array:
    """Their kernels as one."""
    return jnp.concatenate([one.weight(one.kept) for one in projections], axis=projections[0].inputs)


def _outputs_first(kernel: jax.Array, inputs: int) -> jax.Array:
    """[N, K]."""
    size = math.prod(kernel.shape[:inputs])
    return jnp.moveaxis(kernel, range(inputs), range(-inputs, 0)).reshape(-1, size)
