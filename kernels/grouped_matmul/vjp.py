"""A grouped product's gradients are one too, and sums over the rows of each group: two kernels serve all three.

Shapes: M rows, E groups, K inputs, N outputs; of a gradient, outputs are inputs.
"""

from functools import partial
from typing import Protocol

import jax


class Kernels(Protocol):
    """Known when they are compiled, by which JAX knows what it has compiled."""

    def product(self, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, turned: bool) -> jax.Array:
        """x times w [E, K, N], or [E, N, K] if turned."""

    def summed(self, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """[E, K, N]: x^T times d_out over the rows of each group."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped(kernels: Kernels, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return kernels.product(x_MK, w_EKN, sizes_E, turned=False)


def _forward(kernels: Kernels, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, tuple]:
    return grouped(kernels, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(kernels: Kernels, kept: tuple, d_out_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w_EKN, sizes_E = kept
    return kernels.product(d_out_MN, w_EKN, sizes_E, turned=True), kernels.summed(x_MK, d_out_MN, sizes_E), None


grouped.defvjp(_forward, _backward)
