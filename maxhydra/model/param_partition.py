"""The parts of a model's weights: what is trained, what stays as it is, and what layers remember of earlier steps.

With an adapter its own weights are trained; without one all are. Trees are nested dicts with anything for leaves:
arrays, shapes, axes, shardings.
"""

from collections.abc import Callable
from typing import Any

Tree = Any
# The key below which a projection keeps what its adapter adds.
ADAPTER = "lora"
# The key of what a projection remembers (layers/quant/amax_history.py).
HISTORY = "history"


def split_trainable(tree: Tree) -> tuple[Tree, Tree]:
    """(what is trained, the rest, which is empty without an adapter), without what layers remember."""
    weights = _part(tree, HISTORY, within=False) if _has(tree, HISTORY) else tree
    if not _has(weights, ADAPTER):
        return weights, {}
    return _part(weights, ADAPTER, within=True), _part(weights, ADAPTER, within=False)


def remembered(tree: Tree) -> Tree:
    """What layers remember alone; `merge_trees` of it and the parts of `split_trainable` is the tree."""
    return _part(tree, HISTORY, within=True)


def merge_trees(one: Tree, other: Tree) -> Tree:
    """The tree of which two have different leaves."""
    both = {key: merge_trees(one[key], other[key]) for key in one if key in other}
    return {**other, **one, **both}


def mapped(tree: Tree, function: Callable[[tuple[str, ...], Any], Tree], keys: tuple[str, ...] = ()) -> Tree:
    """The tree with a function of keys and leaf in place of each leaf. The old tree is emptied on the way, so that old
    and new leaves need not all exist at once."""
    if not isinstance(tree, dict):
        return function(keys, tree)
    return {name: mapped(tree.pop(name), function, (*keys, name)) for name in list(tree)}


def _has(tree: Tree, key: str) -> bool:
    return isinstance(tree, dict) and any(name == key or _has(below, key) for name, below in tree.items())


def _part(tree: Tree, key: str, *, within: bool) -> Tree:
    """The leaves below a key, or all others; no empty branches."""
    if not isinstance(tree, dict):
        return {} if within else tree
    kept = {}
    for name, below in tree.items():
        if name == key:
            part = below if within else {}
        else:
            part = _part(below, key, within=within)
        if not isinstance(part, dict) or part:
            kept[name] = part
    return kept
