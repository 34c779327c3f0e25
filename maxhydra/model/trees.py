"""The two parts of a model's weights: what is trained, and what stays as it is.

With an adapter its own weights are trained; without one all are. Trees are nested dicts with anything for leaves:
arrays, shapes, axes, shardings.
"""

from collections.abc import Callable
from typing import Any

Tree = Any
# The key below which a projection keeps what its adapter adds.
ADAPTER = "lora"


def split(tree: Tree) -> tuple[Tree, Tree]:
    """(what is trained, the rest, which is empty without an adapter); `join` undoes it."""
    return (tree, {}) if not _has(tree, ADAPTER) else (_part(tree, adapter=True), _part(tree, adapter=False))


def join(one: Tree, other: Tree) -> Tree:
    """The tree of which two have different leaves."""
    both = {key: join(one[key], other[key]) for key in one if key in other}
    return {**other, **one, **both}


def mapped(tree: Tree, function: Callable[[tuple[str, ...], Any], Tree], keys: tuple[str, ...] = ()) -> Tree:
    """The tree with a function of keys and leaf in place of each leaf. The old tree is emptied on the way, so that old
    and new leaves need not all exist at once."""
    if not isinstance(tree, dict):
        return function(keys, tree)
    return {name: mapped(tree.pop(name), function, (*keys, name)) for name in list(tree)}


def _has(tree: Tree, key: str) -> bool:
    return isinstance(tree, dict) and any(name == key or _has(below, key) for name, below in tree.items())


def _part(tree: Tree, *, adapter: bool) -> Tree:
    """The leaves below ADAPTER, or all others; no empty branches."""
    if not isinstance(tree, dict):
        return {} if adapter else tree
    kept = {}
    for name, below in tree.items():
        if name == ADAPTER:
            part = below if adapter else {}
        else:
            part = _part(below, adapter=adapter)
        if not isinstance(part, dict) or part:
            kept[name] = part
    return kept
