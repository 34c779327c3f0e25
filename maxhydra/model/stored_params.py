"""Stored parameters: their names in earlier versions, and a hash that identifies weights in stored results.

Optimizer states repeat the paths of the parameters, so the same table of names applies to them.
"""

import hashlib
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
# Name of a dict key in the parameter tree in earlier versions -> its name now.
RENAMED = {"beside": "parallel_moe"}
ORIGINAL_NAMES = {new: old for old, new in RENAMED.items()}


def current_path(path: str, known: Container[str]) -> str:
    """The name in this version of an array a/b/c of an earlier one; `known` holds the names of this version."""
    renamed = "/".join(RENAMED.get(name, name) for name in path.split("/"))
    # Projections held a bare array until b6b09aa (2026-11-15), and since then a dict of kernel, bias and scales.
    return f"{renamed}/kernel" if renamed not in known and f"{renamed}/kernel" in known else renamed


def _original_names(tree: Tree) -> Tree:
    if not isinstance(tree, dict):
        return tree
    return {ORIGINAL_NAMES.get(key, key): _original_names(value) for key, value in tree.items()}


def fingerprint(weights: Tree) -> str:
    """Hash of the weights; the same on any mesh, in any number of processes, and under earlier parameter names."""
    # Leaves are hashed in the order of their names, which a rename must not change.
    sums = _hash_arrays(jax.tree.leaves(_original_names(weights)))
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
