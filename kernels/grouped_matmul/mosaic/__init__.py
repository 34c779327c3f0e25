"""Grouped matmul for Hopper GPUs in Pallas Mosaic GPU: each group of rows is multiplied by its own matrix.

Persistent programs process many tiles, so loads never wait for the end of a tile: one warpgroup loads, two multiply.

Shapes: M rows, E groups, K inputs, N outputs; in the gradient of x, outputs play the role of inputs.
"""

import dataclasses
import math

import jax

from maxhydra.kernels.grouped_matmul.tiles import grouped_matmul_vjp
from maxhydra.kernels.placement import num_multiprocessors

# Rows, inputs and outputs must be multiples of this.
MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class KernelParams:
    """Static parameters of the kernels."""

    columns: int
    """Columns of a tile."""
    stages: int
    """Pipeline depth: steps whose operands fit in shared memory."""
    band: int
    """Row tiles that sweep the columns together, so that both operands stay in the L2 cache."""
    processors: int
    """Streaming multiprocessors of the GPU: the number of persistent programs."""

    def fitted(self, columns: int) -> "KernelParams":
        """Reduce the tile to a divisor of the columns."""
        return dataclasses.replace(self, columns=math.gcd(self.columns, columns))


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Imports the kernels lazily: Mosaic takes half a second, which hosts without such a GPU should not pay."""

    params: KernelParams

    def matmul(self, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool) -> jax.Array:
        from maxhydra.kernels.grouped_matmul.mosaic.forward import matmul  # noqa: PLC0415

        return matmul(self.params, x_MK, w, sizes_E, transposed=transposed)

    def weight_grad(self, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        from maxhydra.kernels.grouped_matmul.mosaic.weight_grad import weight_grad  # noqa: PLC0415

        return weight_grad(self.params, x_MK, d_out_MN, sizes_E)


def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows of no group give zeros.

    Measured on an H200 with the shapes of Mixtral 8x7B: none of these is faster: a fourth stage, for which a tile would
    have to be written in parts; bands of 8 or 32 tiles; multicast copies for clusters of two programs; staggered
    warpgroups.
    """
    params = KernelParams(columns=256, stages=3, band=16, processors=num_multiprocessors())
    return grouped_matmul_vjp(Kernels(params), x_MK, w_EKN, sizes_E)
