"""Projections of a few tokens together with what stands around them in a block: x + down(gate(norm(x))) in two kernels.

Only where weights lie together for decoding, on one device; what a projection has besides its kernel, such as a bias or
an adapter, it keeps to itself, and goes the way of other products.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.kernels import product_chain
from maxhydra.kernels.einsum import Layout
from maxhydra.kernels.fused_product import Activation, Around, fused_product, suits
from maxhydra.kernels.fused_product import Norm as Factors
from maxhydra.layers.context import Context, Following
from maxhydra.layers.int8 import Int8
from maxhydra.layers.int8 import side_by_side as codes_side_by_side
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
        whole = codes_side_by_side(packed)
        kernel, scales_N = whole.codes, whole.scales.reshape(-1)
    else:
        kernel, scales_N = side_by_side(projections), None
    width, *rest = kernel.shape[first.inputs :]
    weight_NK = _outputs_first(kernel, first.inputs)
    around = Around(
        norm=None if norm is None else norm.factors,
        activation=activation,
        onto_MN=None if onto is None else onto.reshape(-1, onto.shape[-1]),
    )
    out_MN = fused_product(x.reshape(-1, weight_NK.shape[1]), weight_NK, scales_N, around, dtype=x.dtype)
    return out_MN.reshape(*x.shape[:2], width if activation is None else width // 2, *rest)


def can_chain(out: Projection, hidden: Sequence[Projection], down: Projection, x_BTD: jax.Array, ctx: Context) -> bool:
    """Whether all products behind attention meet the rows of x in one kernel."""
    rows, D = math.prod(x_BTD.shape[:2]), x_BTD.shape[2]
    kernels = [projections[0].kernel for projections in ((out,), hidden, (down,)) if can_fuse(projections, x_BTD, ctx)]
    plain = [kernel for kernel in kernels if isinstance(kernel, nnx.Param)]
    if len(plain) < 3:
        return False
    of_out, _, of_down = (kernel[...].size // D for kernel in plain)
    return product_chain.suits(rows, (of_out, D, of_down), out.product.compute)


def chained(
    out: Projection,
    hidden: Sequence[Projection],
    down: Projection,
    mixed_BTNH: jax.Array,
    onto_BTD: jax.Array,
    *,
    norm: RMSNorm,
    activation: Activation,
    following: Following | None,
) -> tuple[jax.Array, jax.Array | None]:
    """x = onto + out(mixed), then x + down(gate(norm(x))), by one kernel; and of that the next layer's heads, where the
    kernel makes them too."""
    groups = ((out,), hidden, (down,))
    weights = product_chain.Weights(*(_outputs_first(side_by_side(group), group[0].inputs) for group in groups))
    mixed_MA, onto_MD = mixed_BTNH.reshape(-1, weights.out_DA.shape[1]), onto_BTD.reshape(-1, onto_BTD.shape[-1])
    norms: tuple[Factors, ...] = (norm.factors,)
    if following is not None:
        weights = weights._replace(heads_QD=_outputs_first(following.kernel_DNH, 1))
        norms = (*norms, norm.factors._replace(scale_K=following.scale_D))
    x_MD, heads_MQ = product_chain.product_chain(mixed_MA, onto_MD, weights, norms, activation)
    x_BTD = x_MD.reshape(onto_BTD.shape)
    if heads_MQ is None or following is None:
        return x_BTD, None
    return x_BTD, heads_MQ.reshape(*onto_BTD.shape[:2], *following.kernel_DNH.shape[1:])


def side_by_side(projections: Sequence[Projection]) -> jax.Array:
    """Their kernels as one, in the first dimension of the outputs."""
    return jnp.concatenate([one.weight(one.kept) for one in projections], axis=projections[0].inputs)


def _outputs_first(kernel: jax.Array, inputs: int) -> jax.Array:
    """[N, K]."""
    size = math.prod(kernel.shape[:inputs])
    return jnp.moveaxis(kernel, range(inputs), range(-inputs, 0)).reshape(-1, size)
