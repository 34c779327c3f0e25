"""What kernels in Pallas for Mosaic share, for Hopper GPUs."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# Rows of a product of the matrix unit, which a warpgroup has of its own.
ROWS = 64
# Warpgroups of a program that compute; one more loads.
WORKERS = 2


def memory(*shape: int, dtype: Any) -> Any:
    """Shared memory for matrices, in the order in which the matrix unit reads them."""
    swizzle = 128
    columns = swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
