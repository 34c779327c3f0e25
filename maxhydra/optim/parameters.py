"""What the optimizer knows about parameters: their paths, and which of their dimensions make a matrix.

Layers are stacked on a leading axis for the scan, experts on the next; to an optimizer that looks at matrices each is a
matrix of its own, and a projection to heads is one matrix with heads x head_dim columns. Logical axis names say so;
shapes do not.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import jax

from maxhydra.config import ConfigError, Problem
from maxhydra.config.regex import matches, unreadable
from maxhydra.sharding import LogicalAxes, is_axes

Tree = Any

# Axes along which independent parameters are stacked.
STACKED = ("layers", "experts")
# Axes that continue the side of the axis before them: heads x head_dim is one side.
CONTINUED = ("head_dim",)
# Axes whose entries are looked up or scored one by one: the parameter is a table of vectors, not a linear map.
TABLES = ("vocab", "positions")


@dataclasses.dataclass(frozen=True)
class Sides:
    """Dimensions of a parameter that is a linear map: those of its rows (inputs) and of its columns (outputs)."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


def own_dimensions(axes: LogicalAxes) -> tuple[int, ...]:
    """Dimensions within one layer, or one expert of it."""
    return tuple(dimension for dimension, name in enumerate(axes) if name not in STACKED)


def sides(axes: LogicalAxes) -> Sides | None:
    """Rows and columns of each layer's matrix; None for a vector, or where there are more than two sides."""
    groups: list[tuple[int, ...]] = []
    for dimension in own_dimensions(axes):
        if axes[dimension] in CONTINUED and groups:
            groups[-1] = (*groups[-1], dimension)
        else:
            groups.append((dimension,))
    return Sides(*groups) if len(groups) == 2 else None


def is_stacked(axes: LogicalAxes) -> bool:
    """Whether the layers of a repeated pattern lie on the first axis."""
    return axes[0] == "layers"


def is_table(axes: LogicalAxes) -> bool:
    return any(name in TABLES for name in axes)


def path_of(keys: jax.tree_util.KeyPath) -> str:
    """`pattern/0/attention/query/kernel`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def paths(tree: Tree) -> Tree:
    """The same tree with each leaf's path in its place."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: path_of(keys), tree)


def axes_by_path(axes: Tree) -> dict[str, LogicalAxes]:
    return {path_of(keys): names for keys, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)}


def check_patterns(trainable: list[str], no_decay: list[str], known: list[str]) -> None:
    """A pattern that cannot be read, or a trainable one that names no parameter, is a ConfigError."""
    problems = [*unreadable("optimizer.trainable", trainable), *unreadable("optimizer.no_decay", no_decay)]
    if not problems:
        problems = list(_unmatched(trainable, known))
    if problems:
        raise ConfigError(problems)


def _unmatched(patterns: list[str], known: list[str]) -> Iterator[Problem]:
    accepted = "regular expressions on parameter paths"
    if not patterns:
        yield Problem("optimizer.trainable", "is empty, so nothing would be trained", value=[], accepted=accepted)
    for pattern in patterns:
        if not any(matches([pattern], path) for path in known):
            near = difflib.get_close_matches(pattern, known, n=5, cutoff=0.0)
            reason = f"no parameter's path matches {pattern!r}"
            hint = f"nearest paths: {', '.join(near)}"
            yield Problem("optimizer.trainable", reason, value=patterns, accepted=accepted, hint=hint)
