"""Projections of a few tokens together with what stands around them in a block: x + down(gate(norm(x))) in two kernels.

Only where weights lie together for decoding, on one device; what a projection has besides its kernel, such as a bias or
an adapter, it keeps to itself, and goes the way of other products.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.kernels.einsum import Layout
from maxhydra.kernels.fused_product import Activation, Around, fused_product, suits
from maxhydra.layers.context import Context
from maxhydra.layers.int8 import Int8, side_by_side
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.projection import Projection, are_alike


def can_fuse(projections: Sequence[Projection], x_BTD: jax.Array, ctx: Context) -> bool:
    """Whether the rows of x meet these projections in kernels that do what stands around them."""
    first, rows = projections[0], math.prod(x_BTD.shape[:2])
    is_bare = all(one.bias is None and (one.lora is None or not ctx.is_adapted) for one in projections)
    is_bare = is_bare and are_alike(projections) and not first.is_rounded
    is_asked = first.product.is_fused and first.product.layout is Layout.joined
    if not (is_asked and is_bare) or ctx.sharder.mesh.size > 1:
        return False
    if isinstance(first.kernel, Int8):
        return suits(rows, jnp.int8)
    return isinstance(first.kernel, nnx.Param) and suits(rows, first.product.compute)


def fused(
    projections: Sequence[Projection],
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
        kernel = jnp.concatenate([one.weight(one.kept) for one in projections], axis=first.inputs)
        scales_N = None
    size, (width, *rest) = math.prod(kernel.shape[: first.inputs]), kernel.shape[first.inputs :]
    weight_NK = jnp.moveaxis(kernel, range(first.inputs), range(-first.inputs, 0)).reshape(-1, size)
    around = Around(
        norm=None if norm is None else norm.factors,
        activation=activation,
        onto_MN=None if onto is None else onto.reshape(-1, onto.shape[-1]),
    )
    out_MN = fused_product(x.reshape(-1, size), weight_NK, scales_N, around, dtype=x.dtype)
    return out_MN.reshape(*x.shape[:2], width if activation is None else width // 2, *rest)
