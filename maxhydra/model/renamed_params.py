"""Parameter names of earlier versions, so that their checkpoints still load.

Optimizer states repeat the paths of the parameters, so the same table applies to them.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

Tree = Any
# Name of a dict key in the parameter tree in earlier versions -> its name now.
RENAMED = {"beside": "parallel_moe"}
ORIGINAL_NAMES = {new: old for old, new in RENAMED.items()}


def current_path(path: str, known: Container[str]) -> str:
    """The name in this version of an array a/b/c of an earlier one; `known` holds the names of this version."""
    renamed = "/".join(RENAMED.get(name, name) for name in path.split("/"))
    # Projections held a bare array until b6b09aa (2026-11-15), and since then a dict of kernel, bias and scales.
    return f"{renamed}/kernel" if renamed not in known and f"{renamed}/kernel" in known else renamed


def stored_names(paths: Iterable[str]) -> dict[str, str]:
    """Current -> stored name for the names in RENAMED that a checkpoint with these paths stores under the old name."""
    parts = {part for path in paths for part in path.split("/")}
    return {new: old for old, new in RENAMED.items() if old in parts}


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
