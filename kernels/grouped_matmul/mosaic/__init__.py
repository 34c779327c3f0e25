"""Grouped matmul for Hopper GPUs in Pallas Mosaic GPU: each group of rows is multiplied by its own matrix.

Persistent programs process many tiles, so loads never wait for the end of a tile: one warpgroup loads, two multiply.

Shapes: M rows, E groups, K inputs, N outputs; in the gradient of x, outputs play the role of inputs.
"""

import dataclasses

import jax

from maxhydra.kernels.grouped_matmul.tiles import Pair, grouped_matmul_pair_vjp, grouped_matmul_vjp
from maxhydra.kernels.placement import num_multiprocessors

# Rows, inputs and outputs must be multiples of this. A tile may extend beyond the end of an array: copies read zeros
# there and write nothing.
MULTIPLE = 64
# Widths of a tile. A tile of c columns takes about as long as c + FIXED: its left operand is loaded for any width.
WIDTHS, FIXED = (256, 192, 128, 64), 48
# Bytes of shared memory for the operands and the result of a tile.
MEMORY = 13 << 14


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
        """Choose the width of a tile, at most `self.columns`, for which this many columns take the least time.

        A narrower tile leaves memory for more stages.
        """
        widths = [width for width in WIDTHS if width <= self.columns]
        width = min(widths, key=lambda width: -(-columns // width) * (width + FIXED))
        stages = (MEMORY - 256 * width) // (128 * (128 + width))
        return dataclasses.replace(self, columns=width, stages=self.stages if width == self.columns else stages)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Imports the kernels lazily: Mosaic takes half a second, which hosts without such a GPU should not pay."""

    params: KernelParams

    def matmul(self, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool) -> jax.Array:
        from maxhydra.kernels.grouped_matmul.mosaic.forward import matmul  # noqa: PLC0415

        return matmul(self.params, x_MK, w, sizes_E, transposed=transposed)

    def matmul_sum(self, x: Pair, w: Pair, sizes_E: jax.Array) -> jax.Array:
        from maxhydra.kernels.grouped_matmul.mosaic.forward import matmul_sum  # noqa: PLC0415

        return matmul_sum(self.params, x, w, sizes_E)

    def weight_grad(self, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        from maxhydra.kernels.grouped_matmul.mosaic.weight_grad import weight_grad  # noqa: PLC0415

        return weight_grad(self.params, x_MK, d_out_MN, sizes_E)


def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows of no group give zeros.

    Measured on an H200 with the shapes of Mixtral 8x7B: none of these is faster: a fourth stage, for which a tile would
    have to be written in parts; bands of 8 or 32 tiles; multicast copies for clusters of two programs; staggered
    warpgroups.
    """
    return grouped_matmul_vjp(_kernels(), x_MK, w_EKN, sizes_E)


def grouped_matmul_pair(x_MK: jax.Array, w: Pair, sizes_E: jax.Array) -> Pair:
    """x times each of two matrices; the gradient of x is a single matmul."""
    return grouped_matmul_pair_vjp(_kernels(), x_MK, w, sizes_E)


def _kernels() -> Kernels:
    return Kernels(KernelParams(columns=256, stages=3, band=16, processors=num_multiprocessors()))
