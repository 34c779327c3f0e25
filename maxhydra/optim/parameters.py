"""Parameter paths, and which dimensions of a parameter are the rows and columns of a matrix.

Layers are stacked on a leading axis for the scan, experts on the next. Matrix optimizers must treat each layer and
expert as a separate matrix, and a projection to heads as one matrix with heads x head_dim columns. The names of the
logical axes determine this; shapes alone do not.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import jax
import optax

from maxhydra.config import ConfigError, Problem
from maxhydra.config.values import matches_any, regex_problems
from maxhydra.sharding import LogicalAxes, is_axes

Tree = Any

# Axes along which independent parameters are stacked.
STACKED = ("layers", "experts")
# Axes that are flattened with the axis before them: heads x head_dim are the rows or the columns.
FLATTENED = ("head_dim",)
# Axes whose entries are looked up or scored one by one: the parameter is a table of vectors, not a linear map.
TABLES = ("vocab", "positions")


@dataclasses.dataclass(frozen=True)
class MatrixDims:
    """Dimensions of a linear map that are its rows (inputs) and its columns (outputs)."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


def unstacked_dims(axes: LogicalAxes) -> tuple[int, ...]:
    """Dimensions within one layer, or one expert of it."""
    return tuple(dimension for dimension, name in enumerate(axes) if name not in STACKED)


def matrix_dims(axes: LogicalAxes) -> MatrixDims | None:
    """Rows and columns of each layer's matrix; None for a vector and for more than two dimensions."""
    groups: list[tuple[int, ...]] = []
    for dimension in unstacked_dims(axes):
        if axes[dimension] in FLATTENED and groups:
            groups[-1] = (*groups[-1], dimension)
        else:
            groups.append((dimension,))
    return MatrixDims(*groups) if len(groups) == 2 else None


def is_stacked(axes: LogicalAxes) -> bool:
    """True if the first axis stacks the layers of a repeated pattern."""
    return axes[0] == "layers"


def is_table(axes: LogicalAxes) -> bool:
    return any(name in TABLES for name in axes)


def layer_matrices(axes: dict[str, LogicalAxes]) -> dict[str, MatrixDims]:
    """Rows and columns of the matrices of the layers, by path: of all parameters but embeddings, head and vectors."""
    dims = {path: matrix_dims(names) for path, names in axes.items() if not is_table(names)}
    return {path: matrix for path, matrix in dims.items() if matrix is not None}


def partition_matrices(
    name: str,
    transform: optax.GradientTransformation,
    rest: optax.GradientTransformation,
    matrices: dict[str, MatrixDims],
) -> optax.GradientTransformation:
    """`transform` for these matrices, under this name in the state, and `rest` for the other parameters."""

    def labels(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda keys, _: name if path_of(keys) in matrices else "adamw", params)

    return optax.partition({name: transform, "adamw": rest}, labels)


def path_of(keys: jax.tree_util.KeyPath) -> str:
    """Path of a parameter, such as `pattern/0/attention/query/kernel`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def paths(tree: Tree) -> Tree:
    """Replace each leaf of the tree by its path."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: path_of(keys), tree)


def axes_by_path(axes: Tree) -> dict[str, LogicalAxes]:
    return {path_of(keys): names for keys, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)}


ACCEPTED = "regular expressions on parameter paths"


def check_patterns(trainable: list[str], no_decay: list[str], ratios: list[str], known: list[str]) -> None:
    """Raise ConfigError for an invalid pattern, or one of trainable or rate_ratios that matches no parameter."""
    patterns = {"trainable": trainable, "no_decay": no_decay, "rate_ratios": ratios}
    problems = [problem for key, values in patterns.items() for problem in regex_problems(f"optimizer.{key}", values)]
    if not problems:
        problems = [*_unmatched("trainable", trainable, known), *_unmatched("rate_ratios", ratios, known)]
    if not trainable:
        reason = "is empty, so nothing would be trained"
        problems.append(Problem("optimizer.trainable", reason, value=[], accepted=ACCEPTED))
    if problems:
        raise ConfigError(problems)


def _unmatched(key: str, patterns: list[str], known: list[str]) -> Iterator[Problem]:
    for pattern in patterns:
        if not any(matches_any([pattern], path) for path in known):
            near = difflib.get_close_matches(pattern, known, n=5, cutoff=0.0)
            reason = f"no parameter's path matches {pattern!r}"
            hint = f"nearest paths: {', '.join(near)}"
            yield Problem(f"optimizer.{key}", reason, value=patterns, accepted=ACCEPTED, hint=hint)
