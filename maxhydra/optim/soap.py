"""SOAP (Vyas et al., 2024): Adam in the eigenbasis of Shampoo's preconditioner, for the matrices of the layers.

A gradient G has the second moments E[G G^T] over its rows and E[G^T G] over its columns. Adam's moments are those of G
rotated to the eigenvectors of both, and its update is rotated back. A refresh of the eigenvectors is one step of
the power method and a QR decomposition. As in the authors' implementation, the first step only initializes the
eigenvectors, so that no gradient is rotated by a basis computed from itself.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxhydra.optim.parameters import STACKED, MatrixDims, path_of
from maxhydra.sharding import LogicalAxes

Tree = Any


class Basis(NamedTuple):
    """The second moment over one side of a matrix and its eigenvectors, both [*stack, n, n] for a side of n."""

    moment: jax.Array
    vectors: jax.Array


class Bases(NamedTuple):
    """Bases of the rows and of the columns; None for a side that is not rotated because it is too long."""

    rows: Basis | None
    columns: Basis | None


class SoapState(NamedTuple):
    """`first` is the mean gradient, `second` that of its rotated squares."""

    applied: jax.Array
    first: Tree
    second: Tree
    bases: Tree


@dataclasses.dataclass(frozen=True)
class SoapRule:
    """Decay rates, steps between two refreshes of the bases, and the longest side that is rotated."""

    b1: float
    b2: float
    eps: float
    every: int
    max_dim: int


def scale_by_soap(matrices: dict[str, MatrixDims], rule: SoapRule) -> optax.GradientTransformation:
    """Scale the gradients of these matrices; each layer and expert of a stack is a separate matrix."""

    def init(params: Tree) -> SoapState:
        def bases(keys: jax.tree_util.KeyPath, param: jax.Array) -> Bases:
            matrix = matrices[path_of(keys)]
            *stack, rows, columns = _matrix_shape(param.shape, matrix)
            return Bases(
                *(_zeros((*stack, length, length)) if length <= rule.max_dim else None for length in (rows, columns))
            )

        first, second = (jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params) for _ in range(2))
        return SoapState(jnp.zeros((), jnp.int32), first, second, jax.tree_util.tree_map_with_path(bases, params))

    def update(updates: Tree, state: SoapState, params: Tree = None) -> tuple[Tree, SoapState]:
        grads, structure = jax.tree_util.tree_flatten_with_path(updates)
        all_bases = jax.tree.leaves(state.bases, is_leaf=lambda node: isinstance(node, Bases))
        moments = zip(jax.tree.leaves(state.first), jax.tree.leaves(state.second), all_bases, strict=True)
        found = [
            _scale(grad, *before, matrices[path_of(keys)], state.applied, rule)
            for (keys, grad), before in zip(grads, moments, strict=True)
        ]
        scaled, first, second, bases = (jax.tree.unflatten(structure, leaves) for leaves in zip(*found, strict=True))
        choice = jnp.where(state.applied == 0, 1, jnp.where(state.applied % rule.every == 0, 2, 0))
        branches = [partial(_map_bases, change) for change in (lambda basis: basis, _initialize, _refresh)]
        return scaled, SoapState(state.applied + 1, first, second, jax.lax.switch(choice, branches, bases))

    return optax.GradientTransformation(init, update)


def bases_axes(bases: Bases, names: LogicalAxes) -> Bases:
    """Logical axes of the bases of a parameter."""
    stack = [name for name in names if name in STACKED]
    return jax.tree.map(lambda _: (*stack, None, None), bases)  # type: ignore[no-any-return]


def _matrix_shape(shape: tuple[int, ...], matrix: MatrixDims) -> tuple[int, ...]:
    """[*stack, rows, columns]."""
    lengths = (math.prod(shape[d] for d in dims) for dims in (matrix.rows, matrix.columns))
    return (*shape[: matrix.rows[0]], *lengths)


def _zeros(shape: tuple[int, ...]) -> Basis:
    return Basis(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def _scale(
    grad: jax.Array,
    first: jax.Array,
    second: jax.Array,
    bases: Bases,
    matrix: MatrixDims,
    applied: jax.Array,
    rule: SoapRule,
) -> tuple[jax.Array, jax.Array, jax.Array, Bases]:
    """The update of one parameter, zero in the first step, and its new moments."""
    shape = _matrix_shape(grad.shape, matrix)
    gradient, mean, square = (array.reshape(shape) for array in (grad, first, second))
    is_first = applied == 0
    mean = jnp.where(is_first, mean, rule.b1 * mean + (1 - rule.b1) * gradient)
    squared = jnp.square(_rotate(gradient, bases))
    square = jnp.where(is_first, square, rule.b2 * square + (1 - rule.b2) * squared)
    count = jnp.maximum(applied, 1).astype(jnp.float32)
    normalized = _rotate(mean, bases) / (1 - rule.b1**count)
    normalized = normalized / (jnp.sqrt(square / (1 - rule.b2**count)) + rule.eps)
    update = jnp.where(is_first, 0.0, _rotate_back(normalized, bases))
    blended = Bases(
        _blend(bases.rows, gradient @ _transpose(gradient), rule.b2),
        _blend(bases.columns, _transpose(gradient) @ gradient, rule.b2),
    )
    return update.reshape(grad.shape), mean.reshape(grad.shape), square.reshape(grad.shape), blended


def _blend(basis: Basis | None, new: jax.Array, decay: float) -> Basis | None:
    return None if basis is None else basis._replace(moment=decay * basis.moment + (1 - decay) * new)


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _rotate(x: jax.Array, bases: Bases) -> jax.Array:
    """Q_rows^T x Q_columns."""
    x = x if bases.rows is None else _transpose(bases.rows.vectors) @ x
    return x if bases.columns is None else x @ bases.columns.vectors


def _rotate_back(x: jax.Array, bases: Bases) -> jax.Array:
    x = x if bases.rows is None else bases.rows.vectors @ x
    return x if bases.columns is None else x @ _transpose(bases.columns.vectors)


def _map_bases(change: Callable[[Basis], Basis], tree: Tree) -> Tree:
    return jax.tree.map(change, tree, is_leaf=lambda node: isinstance(node, Basis))


def _initialize(basis: Basis) -> Basis:
    return basis._replace(vectors=jnp.linalg.eigh(basis.moment)[1])


def _refresh(basis: Basis) -> Basis:
    """Improve the eigenvectors. QR sees them by descending estimates of the eigenvalues; they keep their places."""
    power = basis.moment @ basis.vectors
    order = jnp.argsort(jnp.sum(basis.vectors * power, axis=-2), axis=-1, descending=True)[..., None, :]
    vectors = jnp.linalg.qr(jnp.take_along_axis(power, order, axis=-1))[0]
    return basis._replace(vectors=jnp.take_along_axis(vectors, jnp.argsort(order, axis=-1), axis=-1))
