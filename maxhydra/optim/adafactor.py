"""Adafactor (Shazeer and Stern, 2018) for stacked layers.

optax factors the two largest dimensions of an array and takes root mean squares over the whole of it. On a stack of
layers that may be the layer axis, and the layers would share statistics; here the sides of each layer's matrix are
given by name, so that a stack is updated exactly as its layers would be one by one.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxhydra.optim.parameters import Sides, own_dimensions, path_of, sides
from maxhydra.sharding import LogicalAxes

Tree = Any

# The paper's constants: root mean square at which an update is clipped (d), least scale of a parameter (eps2).
CLIP_RMS = 1.0
LEAST_SCALE = 1e-3


class Factored(NamedTuple):
    """Second moment of a matrix: the means of its rows and of its columns."""

    rows: jax.Array
    columns: jax.Array


class AdafactorState(NamedTuple):
    applied: jax.Array
    second: Tree


def scale_by_adafactor(
    axes: dict[str, LogicalAxes], *, b2_decay: float, eps: float, min_dim: int
) -> optax.GradientTransformation:
    """g / sqrt(v), clipped to a root mean square of 1, times the parameter's own root mean square.

    v is small, and in float32 whatever the weights are in: after 2,500 steps it decays by less than half of the last
    bit of bfloat16 at a time, and would stay where it is for good.
    """

    def split(path: str, shape: tuple[int, ...]) -> Sides | None:
        return factored_sides(axes[path], shape, min_dim=min_dim)

    def init(params: Tree) -> AdafactorState:
        def second(keys: jax.tree_util.KeyPath, param: jax.Array) -> jax.Array | Factored:
            matrix = split(path_of(keys), param.shape)
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
            matrix = split(path, grad.shape)
            new_second = _blend(second, _second_moment(grad, matrix, eps), decay)
            own = own_dimensions(axes[path])
            scaled = grad * _inverse_sqrt(new_second, matrix)
            clipped = scaled / jnp.maximum(1.0, _rms(scaled, own) / CLIP_RMS)
            new_updates.append(clipped * jnp.maximum(_rms(param, own), LEAST_SCALE))
            new_seconds.append(new_second)
        whole = [jax.tree.unflatten(structure, leaves) for leaves in (new_updates, new_seconds)]
        return whole[0], AdafactorState(state.applied + 1, whole[1])

    return optax.GradientTransformation(init, update)


def factored_sides(axes: LogicalAxes, shape: tuple[int, ...], *, min_dim: int) -> Sides | None:
    """The sides over which a parameter's second moment is factored; None keeps it whole."""
    matrix = sides(axes)
    if matrix is None:
        return None
    lengths = [math.prod(shape[d] for d in side) for side in (matrix.rows, matrix.columns)]
    return matrix if min(lengths) >= min_dim else None


def _second_moment(grad: jax.Array, matrix: Sides | None, eps: float) -> jax.Array | Factored:
    squared = jnp.square(grad) + eps
    if matrix is None:
        return squared
    return Factored(rows=jnp.mean(squared, axis=matrix.columns), columns=jnp.mean(squared, axis=matrix.rows))


def _blend(old: jax.Array | Factored, new: jax.Array | Factored, decay: jax.Array) -> jax.Array | Factored:
    return jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)


def _inverse_sqrt(second: jax.Array | Factored, matrix: Sides | None) -> jax.Array:
    """v ** -1/2, with v = rows x columns / mean(rows) where it is factored."""
    if matrix is None or not isinstance(second, Factored):
        return jax.lax.rsqrt(jnp.asarray(second))
    rows = jnp.expand_dims(second.rows, matrix.columns)
    columns = jnp.expand_dims(second.columns, matrix.rows)
    return jax.lax.rsqrt(rows / jnp.mean(rows, axis=matrix.rows, keepdims=True)) * jax.lax.rsqrt(columns)


def _rms(x: jax.Array, own: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=own, keepdims=True))


def _shape_without(x: jax.Array, dropped: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for dimension, size in enumerate(x.shape) if dimension not in dropped)
