"""All products of a layer behind attention for a few rows: x = onto + out(mixed), then x + down(gate(norm(x))); and of
that the next layer's before its attention.

To decode a token is to read every weight once for a few rows, and a kernel for each product leaves memory waiting while
it begins and ends, here as long as for a third of the bytes.

Shapes: M rows, A heads of attention, D residual stream, F hidden.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxhydra.kernels.fused_product.around import Activation, Norm
from maxhydra.kernels.product_chain import reference
from maxhydra.kernels.product_chain.plan import ROWS, Plan
from maxhydra.kernels.product_chain.weights import Weights

__all__ = ["Weights", "product_chain", "suits"]

CAPABILITY = "9.0"


def suits(rows: int, sizes: tuple[int, int, int], dtype: DTypeLike) -> bool:
    """Whether the devices there are have a kernel for so many rows and the sizes A, D and F."""
    plan = Plan(*sizes)
    if jax.default_backend() != "gpu" or jnp.dtype(dtype) != jnp.bfloat16 or rows != ROWS or not plan.fits:
        return False
    device: Any = jax.devices()[0]
    return device.compute_capability == CAPABILITY and device.core_count >= plan.programs


def product_chain(
    mixed_MA: jax.Array, onto_MD: jax.Array, weights: Weights, norms: tuple[Norm, ...], activation: Activation
) -> tuple[jax.Array, jax.Array | None]:
    """The stream [M, D] behind the layer, and the next layer's heads [M, Q] where its weights are given and there is
    room; `norms`: before the feed-forward and before these heads, alike but for their scales."""
    rows, sizes = mixed_MA.shape[0], (mixed_MA.shape[1], onto_MD.shape[1], weights.down_DF.shape[1])
    if not suits(rows, sizes, mixed_MA.dtype):
        return reference.chain(mixed_MA, onto_MD, weights, norms, activation)
    # Mosaic takes half a second to import, which no machine without such a GPU should wait for.
    from maxhydra.kernels.product_chain.mosaic import chain  # noqa: PLC0415

    plan = Plan(*sizes)
    if weights.heads_QD is not None:
        whole = Plan(*sizes, Q=weights.heads_QD.shape[0])
        plan = whole if whole.fits else plan
    weights = weights if plan.Q is not None else weights._replace(heads_QD=None)
    return chain(mixed_MA, onto_MD, weights, norms[: plan.norms], activation, plan=plan)
