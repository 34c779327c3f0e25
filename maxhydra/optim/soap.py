"""SOAP (Vyas et al., 2024): Adam in the eigenbasis of Shampoo's preconditioner, for the matrices of the layers.

A gradient G has the second moments E[G G^T] over its rows and E[G^T G] over its columns. Adam's moments are those of G
rotated to the eigenvectors of both, and its update is rotated back. A refresh of the eigenvectors is one step of
the power method and a QR decomposition. As in the authors' implementation, the first step only initializes the
eigenvectors, so that no gradient is rotated by a basis computed from itself.

On a mesh, a basis is sharded over the axes that shard its matrix. Each decomposition runs on one device.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxhydra.kernels.placement import Placement
from maxhydra.optim.distribute import MatrixRule, map_matrices
from maxhydra.optim.parameters import STACKED, MatrixDims, layer_matrices, matrix_dims, path_of
from maxhydra.sharding import LogicalAxes, Sharder

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


def scale_by_soap(axes: dict[str, LogicalAxes], rule: SoapRule, sharder: Sharder) -> optax.GradientTransformation:
    """Scale the gradients of these matrices; each layer and expert of a stack is a separate matrix."""
    matrices = layer_matrices(axes)

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
        changes = [partial(_update_vectors, new, axes, sharder) for new in (_initialize, _refresh)]
        bases = jax.lax.switch(choice, [lambda bases: bases, *changes], bases)
        return scaled, SoapState(state.applied + 1, first, second, bases)

    return optax.GradientTransformation(init, update)


def bases_axes(bases: Bases, names: LogicalAxes) -> Bases:
    """Logical axes of the bases of a parameter: a side's own axis along one dimension, the other's along the other."""
    matrix = matrix_dims(names)
    assert matrix is not None
    stack = [name for name in names if name in STACKED]
    rows, columns = names[matrix.rows[0]], names[matrix.columns[0]]
    pairs = ((bases.rows, (rows, columns)), (bases.columns, (columns, rows)))
    return Bases(*(jax.tree.map(lambda _, axes=axes: (*stack, *axes), basis) for basis, axes in pairs))


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


def _update_vectors(rule: MatrixRule, axes: dict[str, LogicalAxes], sharder: Sharder, bases: Tree) -> Tree:
    """Replace the eigenvectors by those that a rule computes from the moments and the old ones."""
    names = jax.tree_util.tree_map_with_path(
        lambda keys, node: bases_axes(node, axes[path_of(keys)]), bases, is_leaf=lambda node: isinstance(node, Bases)
    )
    structure: Any
    found, structure = jax.tree.flatten(bases, is_leaf=lambda node: isinstance(node, Basis))
    moment_axes = [basis.moment for basis in structure.flatten_up_to(names)]
    specs = [sharder.dividing_spec(of, basis.moment.shape) for of, basis in zip(moment_axes, found, strict=True)]
    vectors = map_matrices(rule, found, specs, Placement(sharder.platform, sharder.mesh))
    return structure.unflatten([basis._replace(vectors=new) for basis, new in zip(found, vectors, strict=True)])


def _initialize(moment: jax.Array, vectors: jax.Array) -> jax.Array:
    return jnp.linalg.eigh(moment)[1]


def _refresh(moment: jax.Array, vectors: jax.Array) -> jax.Array:
    """Improve the eigenvectors. QR sees them by descending estimates of the eigenvalues; they keep their places."""
    power = moment @ vectors
    order = jnp.argsort(jnp.sum(vectors * power, axis=-2), axis=-1, descending=True)[..., None, :]
    vectors = jnp.linalg.qr(jnp.take_along_axis(power, order, axis=-1))[0]
    return jnp.take_along_axis(vectors, jnp.argsort(order, axis=-1), axis=-1)
