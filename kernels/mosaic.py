"""Constants and helpers shared by the Pallas Mosaic GPU kernels, for Hopper GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# Rows of one wgmma, computed by one warpgroup.
ROWS = 64
# Compute warpgroups of a program; one more warpgroup issues the loads.
WORKERS = 2


def shared_memory(*shape: int, dtype: Any) -> Any:
    """Shared memory for matrix operands, tiled and swizzled as wgmma reads them."""
    swizzle = 128
    columns = swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def slot_of(n: Any, stages: int) -> Any:
    """The pipeline slot that holds the operands of step n."""
    return jax.lax.rem(n, jnp.int32(stages))
