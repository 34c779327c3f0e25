"""The gradient of a grouped matmul: another grouped matmul, and sums over the rows of each group.

Two kernels serve the forward pass and both gradients. Shapes: M rows, E groups, K inputs, N outputs; in the gradient of
x, outputs play the role of inputs.
"""

from functools import partial
from typing import Protocol

import jax


class Kernels(Protocol):
    """The two kernels with their static parameters; hashable, so that JAX can cache compiled programs."""

    def matmul(self, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool) -> jax.Array:
        """x times w [E, K, N], or [E, N, K] if transposed."""

    def weight_grad(self, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """[E, K, N]: x^T times d_out over the rows of each group."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul_vjp(kernels: Kernels, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return kernels.matmul(x_MK, w_EKN, sizes_E, transposed=False)


def _forward(kernels: Kernels, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, tuple]:
    return grouped_matmul_vjp(kernels, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(kernels: Kernels, residuals: tuple, d_out_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w_EKN, sizes_E = residuals
    return kernels.matmul(d_out_MN, w_EKN, sizes_E, transposed=True), kernels.weight_grad(x_MK, d_out_MN, sizes_E), None


grouped_matmul_vjp.defvjp(_forward, _backward)
