"""Products of groups of rows, each group with a matrix of its own, for Hopper GPUs in Pallas for Mosaic.

Programs go over many tiles, so that loading never waits for a tile's end: one warpgroup loads, two multiply.

Shapes: M rows, E groups, K inputs, N outputs; of a gradient, outputs are inputs.
"""

import dataclasses

import jax

from maxhydra.kernels.grouped_matmul.mosaic.params import How
from maxhydra.kernels.grouped_matmul.vjp import grouped
from maxhydra.kernels.placement import processors

# Of rows, inputs and outputs.
MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Mosaic takes half a second to import, which no machine without such a GPU should wait for."""

    how: How

    def product(self, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, turned: bool) -> jax.Array:
        from maxhydra.kernels.grouped_matmul.mosaic.forward import product  # noqa: PLC0415

        return product(self.how, x_MK, w, sizes_E, turned=turned)

    def summed(self, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        from maxhydra.kernels.grouped_matmul.mosaic.weight_grad import summed  # noqa: PLC0415

        return summed(self.how, x_MK, d_out_MN, sizes_E)


def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows of no group give zeros.

    Measured on an H200 with the shapes of Mixtral 8x7B: a fourth stage, for which a tile would have to leave in parts,
    bands of 8 or 32 tiles, copies for clusters of two programs, and one warpgroup ahead of the other are no faster.
    """
    how = How(columns=256, stages=3, band=16, processors=processors())
    return grouped(Kernels(how), x_MK, w_EKN, sizes_E)
