"""Products of groups of rows, each group with a matrix of its own, for Hopper GPUs in Pallas for Mosaic.

Programs go over many tiles, so that loading never waits for a tile's end: one warpgroup loads, two multiply. Programs
that are beside each other may form a cluster, whose copies are for all of them.

Shapes: M rows, E groups, K inputs, N outputs; of a gradient, outputs are inputs.
"""

from functools import partial

import jax

from maxhydra.kernels.grouped_matmul.mosaic.how import MEASURED, How, Tiles
from maxhydra.kernels.place import processors

# Of rows, inputs and outputs.
MULTIPLE = 128


def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, *, tiles: Tiles = MEASURED) -> jax.Array:
    """Rows of no group are left as they were in memory."""
    return serve(How(tiles, processors()), x_MK, w_EKN, sizes_E)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def serve(how: How, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    # Mosaic takes half a second to import, which no machine without such a GPU should wait for.
    from maxhydra.kernels.grouped_matmul.mosaic.product import product  # noqa: PLC0415

    return product(how, x_MK, w_EKN, sizes_E, turned=False)


def _forward(how: How, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, tuple]:
    return serve(how, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(how: How, kept: tuple, d_out_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    from maxhydra.kernels.grouped_matmul.mosaic.product import product  # noqa: PLC0415
    from maxhydra.kernels.grouped_matmul.mosaic.summed import summed  # noqa: PLC0415

    x_MK, w_EKN, sizes_E = kept
    d_x_MK = product(how, d_out_MN, w_EKN, sizes_E, turned=True)
    return d_x_MK, summed(how, x_MK, d_out_MN, sizes_E), None


serve.defvjp(_forward, _backward)
