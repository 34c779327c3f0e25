"""Logical axes of the optimizer state, so that it is sharded like its parameters."""

from typing import Any

import jax

from maxhydra.optim.adafactor import Factored
from maxhydra.optim.build import Optimizer
from maxhydra.optim.parameters import matrix_dims, path_of
from maxhydra.sharding import LogicalAxes, is_axes

Tree = Any


def state_axes(optimizer: Optimizer, shapes: Tree, axes: Tree) -> Tree:
    """A tree with the structure of `transform.init`'s result and the logical axes of each leaf.

    Every tree of moments has the keys of the parameters, so the end of a leaf's path names its parameter. A moment has
    its parameter's axes; a factored one the axes of its remaining dimensions; counts and constants are replicated.
    """
    state = jax.eval_shape(optimizer.transform.init, shapes)
    by_keys = {
        keys: (path_of(keys), names) for keys, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    }
    shape_of = {path_of(keys): leaf.shape for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes)}

    def axes_of_leaf(keys: jax.tree_util.KeyPath, leaf: Any) -> LogicalAxes | Factored:
        parameter = next((by_keys[keys[i:]] for i in range(len(keys)) if keys[i:] in by_keys), None)
        if parameter is None:
            return (None,) * len(leaf.shape)
        path, names = parameter
        if isinstance(leaf, Factored):
            return _factored_axes(names)
        if leaf.shape != shape_of[path]:
            raise ValueError(f"{path_of(keys)} has shape {leaf.shape}, its parameter {path} has {shape_of[path]}")
        return names

    return jax.tree_util.tree_map_with_path(axes_of_leaf, state, is_leaf=lambda node: isinstance(node, Factored))


def _factored_axes(names: LogicalAxes) -> Factored:
    """Row means have all dimensions except the columns', column means all except the rows'."""
    matrix = matrix_dims(names)
    assert matrix is not None
    rows, columns = (
        tuple(name for dimension, name in enumerate(names) if dimension not in dropped)
        for dropped in (matrix.columns, matrix.rows)
    )
    return Factored(rows=rows, columns=columns)  # type: ignore[arg-type]
