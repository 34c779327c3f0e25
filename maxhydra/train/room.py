"""Room among the large arrays of a run for the small ones that come and go with every step."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from maxhydra.sharding import Sharder

BYTES = 64 * 2**20


@contextmanager
def room_for_small_arrays(sharder: Sharder) -> Iterator[None]:
    """On GPUs, leave a gap of a few megabytes before the large arrays that are made inside.

    The allocator there takes the smallest free piece that is large enough. Batches and metrics come while a step runs,
    and without such a gap get a place behind its temporaries. What is free is then split there for good, and a step
    that needs most of it in one piece fits a few times, until something small lies in the other part too.
    """
    has_pool = sharder.platform == "gpu" and isinstance(sharder.mesh, jax.sharding.Mesh)
    devices = sharder.mesh.local_devices if has_pool else ()
    gaps = [jnp.zeros(BYTES, jnp.uint8, device=device) for device in devices]
    yield
    for gap in gaps:
        gap.delete()
