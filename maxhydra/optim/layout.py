"""Logical axes of the optimizer's state, so that it is split over the mesh as its parameters are."""

from typing import Any

import jax

from maxhydra.optim.adafactor import Factored
from maxhydra.optim.build import Optimizer
from maxhydra.optim.parameters import path_of, sides
from maxhydra.sharding import LogicalAxes, is_axes

Tree = Any


def state_axes(optimizer: Optimizer, shapes: Tree, axes: Tree) -> Tree:
    """A tree with the structure of `transform.init`'s result and the axes of each leaf in its place.

    Every tree of moments repeats the parameters' keys, so the end of a leaf's path names its parameter. A moment has
    its parameter's axes; a factored one those of the dimensions it keeps; counts and constants are whole everywhere.
    """
    state = jax.eval_shape(optimizer.transform.init, shapes)
    by_keys = {
        keys: (path_of(keys), names) for keys, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    }
    whole = {path_of(keys): leaf.shape for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes)}

    def name(keys: jax.tree_util.KeyPath, leaf: Any) -> LogicalAxes | Factored:
        parameter = next((by_keys[keys[i:]] for i in range(len(keys)) if keys[i:] in by_keys), None)
        if parameter is None:
            return (None,) * len(leaf.shape)
        path, names = parameter
        if isinstance(leaf, Factored):
            return _factored(names)
        if leaf.shape != whole[path]:
            raise ValueError(f"{path_of(keys)} has shape {leaf.shape}, its parameter {path} has {whole[path]}")
        return names

    return jax.tree_util.tree_map_with_path(name, state, is_leaf=lambda node: isinstance(node, Factored))


def _factored(names: LogicalAxes) -> Factored:
    """Rows keep all dimensions but the columns', columns all but the rows'."""
    matrix = sides(names)
    assert matrix is not None
    kept = [
        tuple(name for dimension, name in enumerate(names) if dimension not in dropped)
        for dropped in (matrix.columns, matrix.rows)
    ]
    return Factored(rows=kept[0], columns=kept[1])  # type: ignore[arg-type]
