"""What kernels in Pallas for Mosaic share, for Hopper GPUs."""

from typing import Any

import jax
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


def slot_of(n: Any, stages: int) -> Any:
    """Where the step n finds what was loaded for it."""
    return jax.lax.rem(n, jnp.int32(stages))
