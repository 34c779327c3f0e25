"""The largest numbers that arrays had in earlier steps, by which float8 scales them (kernels/float8).

A history is no weight: no optimizer sees it, and what stands as its gradient is the column that the next step finds in
front. It lies beside the kernel of its projection, and travels with the weights.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

# Of the input, the kernel, and the gradient of the output.
ARRAYS = 3


class AmaxHistory(nnx.Variable):
    """Columns [arrays, steps], the last step first."""


@jax.custom_vjp
def shared(histories: Sequence[jax.Array]) -> jax.Array:
    """The history of projections whose products are one; what the product sees, all of them saw."""
    return jnp.max(jnp.stack(list(histories)), axis=0)


shared.defvjp(lambda histories: (shared(histories), len(histories)), lambda count, seen: ([seen] * count,))
