"""Stored parameters: their names in earlier versions, and a hash that identifies weights in stored results.

Optimizer states repeat the paths of the parameters, so the same table of names applies to them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Name of a dict key in the parameter tree in earlier versions -> its name now.
RENAMED = {"beside": "parallel_moe"}
ORIGINAL_NAMES = {new: old for old, new in RENAMED.items()}


def current_path(path: str) -> str:
    """A path a/b/c of an earlier version under the names of this one."""
    return "/".join(RENAMED.get(name, name) for name in path.split("/"))


def stored_names(paths: Iterable[str]) -> dict[str, str]:
    """Current -> stored name for the names in RENAMED that a checkpoint with these paths stores under the old name."""
    parts = {part for path in paths for part in path.split("/")}
    return {new: old for old, new in RENAMED.items() if old in parts}


Tree = Any


def rename_keys(tree: Tree, names: Mapping[str, str]) -> Tree:
    """The tree with the keys of its dicts renamed; also within the tuples of optimizer states."""
    if not names:
        return tree
    if isinstance(tree, dict):
        return {names.get(key, key): rename_keys(value, names) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rename_keys(value, names) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(rename_keys(value, names) for value in tree)
    return tree


def restore_keys(tree: Tree, names: Mapping[str, str]) -> Tree:
    """The inverse of `rename_keys`."""
    return rename_keys(tree, {old: new for new, old in names.items()})


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
