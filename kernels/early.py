"""The next kernel on its way before this one has ended.

From one kernel's end to the first load of the next about 2 us pass on an H200, in which memory rests; a step of
decoding has over a hundred kernels. XLA starts kernels early where their code allows it (programmatic dependent
launch): it makes each wait, before its first load, for the one before to have ended and written everything. What is
left to a kernel is to say when its successor may take the place that is free beside it.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

LET = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"


def next_may_start(number: int | jax.Array, *, interpret: bool) -> jax.Array:
    """The integer as it is, inside a Triton kernel for Hopper or later. The programs of the next kernel may come when
    all of this one have got here; whatever uses the number comes after."""
    given = jnp.full((1,), number, jnp.int32)
    if interpret or not _is_hopper():
        return jnp.max(given)
    (same,) = plt.elementwise_inline_asm(
        LET,
        args=[given],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(given.shape, given.dtype)],
    )
    return jnp.max(same)


def _is_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and float(device.compute_capability) >= 9.0
