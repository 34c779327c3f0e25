"""Partition of a model's variables into trainable weights, frozen weights and amax histories.

With an adapter only its weights are trained; without one all are. Trees are nested dicts with any leaves: arrays,
shapes, axes, shardings.
"""

from collections.abc import Callable
from typing import Any

Tree = Any
# Key of a projection's LoRA weights.
ADAPTER = "lora"
# Key of a projection's amax history (layers/quant/amax_history.py).
HISTORY = "history"


def split_trainable(tree: Tree) -> tuple[Tree, Tree]:
    """(trainable weights, frozen weights), without amax histories; nothing is frozen without an adapter."""
    weights = _part(tree, HISTORY, within=False) if _has(tree, HISTORY) else tree
    if not _has(weights, ADAPTER):
        return weights, {}
    return _part(weights, ADAPTER, within=True), _part(weights, ADAPTER, within=False)


def amax_histories(tree: Tree) -> Tree:
    """Only the amax histories; `merge_trees` of these and both parts of `split_trainable` gives the tree."""
    return _part(tree, HISTORY, within=True)


def merge_trees(first: Tree, second: Tree) -> Tree:
    """The union of two trees with disjoint leaves."""
    common = {key: merge_trees(first[key], second[key]) for key in first if key in second}
    return {**second, **first, **common}


def map_leaves(tree: Tree, function: Callable[[tuple[str, ...], Any], Tree], keys: tuple[str, ...] = ()) -> Tree:
    """Replace each leaf by a function of its keys and value.

    The old tree is emptied in the process, so old and new leaves need not all exist at once.
    """
    if not isinstance(tree, dict):
        return function(keys, tree)
    return {name: map_leaves(tree.pop(name), function, (*keys, name)) for name in list(tree)}


def _has(tree: Tree, key: str) -> bool:
    return isinstance(tree, dict) and any(name == key or _has(below, key) for name, below in tree.items())


def _part(tree: Tree, key: str, *, within: bool) -> Tree:
    """The leaves below a key, or all others, without empty branches."""
    if not isinstance(tree, dict):
        return {} if within else tree
    part = {}
    for name, below in tree.items():
        if name == key:
            subtree = below if within else {}
        else:
            subtree = _part(below, key, within=within)
        if not isinstance(subtree, dict) or subtree:
            part[name] = subtree
    return part
