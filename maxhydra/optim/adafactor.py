"""Adafactor (Shazeer and Stern, 2018) for stacked layers.

optax factors the two largest dimensions of an array and takes RMS values over the whole array. In a stack of layers
one of these may be the layer axis, so that layers would share statistics. Here the rows and columns of each layer's
matrix follow from the names of the logical axes, and a stack is updated exactly as its layers would be one by one.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxhydra.optim.parameters import MatrixDims, matrix_dims, path_of, unstacked_dims
from maxhydra.sharding import LogicalAxes

Tree = Any

# The paper's constants: RMS to which an update is clipped (d), minimum scale of a parameter (eps2).
CLIP_RMS = 1.0
MIN_SCALE = 1e-3


class Factored(NamedTuple):
    """Factored second moment of a matrix: its row means and column means."""

    rows: jax.Array
    columns: jax.Array


class AdafactorState(NamedTuple):
    applied: jax.Array
    second: Tree


def scale_by_adafactor(
    axes: dict[str, LogicalAxes], *, b2_decay: float, eps: float, min_dim: int
) -> optax.GradientTransformation:
    """Scale gradients to g / sqrt(v), clipped to an RMS of 1, times the RMS of the parameter.

    v is stored in float32 whatever the dtype of the weights: after 2,500 steps an update changes it by less than half
    a bfloat16 ulp, so in bfloat16 it would never change again. Factored, it is small.
    """

    def dims_of(path: str, shape: tuple[int, ...]) -> MatrixDims | None:
        return factored_dims(axes[path], shape, min_dim=min_dim)

    def init(params: Tree) -> AdafactorState:
        def second(keys: jax.tree_util.KeyPath, param: jax.Array) -> jax.Array | Factored:
            matrix = dims_of(path_of(keys), param.shape)
            if matrix is None:
                return jnp.zeros(param.shape, jnp.float32)
            rows, columns = _shape_without(param, matrix.columns), _shape_without(param, matrix.rows)
            return Factored(rows=jnp.zeros(rows, jnp.float32), columns=jnp.zeros(columns, jnp.float32))

        return AdafactorState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(second, params))

    def update(updates: Tree, state: AdafactorState, params: Tree) -> tuple[Tree, AdafactorState]:
        grads, structure = jax.tree_util.tree_flatten_with_path(updates)
        decay = 1 - (state.applied + 1.0) ** -b2_decay
        new_updates, new_seconds = [], []
        weights = jax.tree.leaves(params)
        seconds = jax.tree.leaves(state.second, is_leaf=lambda node: isinstance(node, Factored))
        for (keys, grad), second, param in zip(grads, seconds, weights, strict=True):
            path = path_of(keys)
            matrix = dims_of(path, grad.shape)
            new_second = _blend(second, _second_moment(grad, matrix, eps), decay)
            dims = unstacked_dims(axes[path])
            scaled = grad * _inverse_sqrt(new_second, matrix)
            clipped = scaled / jnp.maximum(1.0, _rms(scaled, dims) / CLIP_RMS)
            new_updates.append(clipped * jnp.maximum(_rms(param, dims), MIN_SCALE))
            new_seconds.append(new_second)
        update_tree, second_tree = (jax.tree.unflatten(structure, leaves) for leaves in (new_updates, new_seconds))
        return update_tree, AdafactorState(state.applied + 1, second_tree)

    return optax.GradientTransformation(init, update)


def factored_dims(axes: LogicalAxes, shape: tuple[int, ...], *, min_dim: int) -> MatrixDims | None:
    """Rows and columns over which a parameter's second moment is factored; None if it is not factored."""
    matrix = matrix_dims(axes)
    if matrix is None:
        return None
    lengths = [math.prod(shape[d] for d in dims) for dims in (matrix.rows, matrix.columns)]
    return matrix if min(lengths) >= min_dim else None


def _second_moment(grad: jax.Array, matrix: MatrixDims | None, eps: float) -> jax.Array | Factored:
    squared = jnp.square(grad) + eps
    if matrix is None:
        return squared
    return Factored(rows=jnp.mean(squared, axis=matrix.columns), columns=jnp.mean(squared, axis=matrix.rows))


def _blend(old: jax.Array | Factored, new: jax.Array | Factored, decay: jax.Array) -> jax.Array | Factored:
    return jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)


def _inverse_sqrt(second: jax.Array | Factored, matrix: MatrixDims | None) -> jax.Array:
    """v ** -1/2; a factored v is rows x columns / mean(rows)."""
    if matrix is None or not isinstance(second, Factored):
        return jax.lax.rsqrt(jnp.asarray(second))
    rows = jnp.expand_dims(second.rows, matrix.columns)
    columns = jnp.expand_dims(second.columns, matrix.rows)
    return jax.lax.rsqrt(rows / jnp.mean(rows, axis=matrix.rows, keepdims=True)) * jax.lax.rsqrt(columns)


def _rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _shape_without(x: jax.Array, dropped: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for dimension, size in enumerate(x.shape) if dimension not in dropped)
