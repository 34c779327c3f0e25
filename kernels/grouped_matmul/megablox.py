"""Grouped matmul on TPUs: JAX's megablox kernels in Pallas (Gale et al., 2022), which tile the rows of a group."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

# Rows of a tile, and inputs or outputs by the bytes of an element: the operands of the matmul and of both gradients fit
# the 16 MiB of vector memory that XLA grants a kernel on every TPU. Not measured: no TPU was available.
ROWS = 512
COLUMNS = {2: 1024, 4: 512}
# Smaller tiles underuse the matrix unit.
MULTIPLE = 128


def grouped_matmul(
    x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, columns: int | None = None, interpret: bool = False
) -> jax.Array:
    """Rows of no group are left uninitialised."""
    tiling = _tiling(columns or COLUMNS[x_MD.dtype.itemsize])
    return gmm(x_MD, w_EDF, sizes_E.astype(jnp.int32), x_MD.dtype, tiling, None, None, False, interpret)


@functools.cache
def _tiling(columns: int) -> Callable[[int, int, int], tuple[int, int, int]]:
    """Tile of a matmul by its sizes; cached, because JAX caches compiled programs by the identity of the function."""
    return lambda rows, inputs, outputs: (math.gcd(rows, ROWS), min(inputs, columns), min(outputs, columns))
