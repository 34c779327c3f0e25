"""A hash of weights, which identifies them in stored results."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.model.renamed_params import ORIGINAL_NAMES, rename_keys

Tree = Any


def fingerprint(weights: Tree) -> str:
    """Hash of the weights; the same on any mesh, in any number of processes, and under earlier parameter names."""
    # Leaves are hashed in the order of their names, which a rename must not change.
    sums = _hash_arrays(jax.tree.leaves(rename_keys(weights, ORIGINAL_NAMES)))
    return hashlib.blake2b(np.array([int(total) for total in sums], "<u4").tobytes(), digest_size=16).hexdigest()


@jax.jit
def _hash_arrays(leaves: list[jax.Array]) -> list[jax.Array]:
    """One number per array that depends on all its bits and their positions, but not on its sharding."""

    def hash_array(leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize])
        total = bits.astype(jnp.uint32)
        for axis in reversed(range(leaf.ndim)):
            indices = jnp.arange(leaf.shape[axis], dtype=jnp.uint32)
            factors = indices * jnp.uint32(2654435761) + jnp.uint32(2 * axis + 1)
            total = jnp.sum(total * factors, axis=axis, dtype=jnp.uint32)
        return total

    return [hash_array(leaf) for leaf in leaves]
