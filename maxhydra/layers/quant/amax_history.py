"""Amax history for delayed scaling in FP8 training (kernels/fp8_matmul).

A history is not a weight: the optimizer does not see it, and its "gradient" is the newest column, the amaxes of this
step. It is stored next to the kernel of its projection and travels with the weights.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

# Input, kernel, and gradient of the output.
ARRAYS = 3


class AmaxHistory(nnx.Variable):
    """Amaxes [arrays, steps], newest step first."""


@jax.custom_vjp
def merge_histories(histories: Sequence[jax.Array]) -> jax.Array:
    """One history for a fused matmul of several projections; each gets the amaxes of the fused matmul."""
    return jnp.max(jnp.stack(list(histories)), axis=0)


merge_histories.defvjp(
    lambda histories: (merge_histories(histories), len(histories)), lambda count, amaxes: ([amaxes] * count,)
)
