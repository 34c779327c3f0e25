"""The norm of the gradients of what is trained, and gradients cut to it."""

import dataclasses
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@dataclasses.dataclass(frozen=True)
class Norm:
    """sqrt of the sum of squares in float32, over the leaves that are trained."""

    is_trained: Tree
    """Of each leaf."""
    is_apart: Tree
    """Whether the layers of a leaf, stacked on its first axis, were written out, so that their gradients come one by
    one: XLA would join them on the way to the sum, at a third of the speed of memory."""

    def __call__(self, grads: Tree) -> jax.Array:
        leaves = zip(*map(jax.tree.leaves, (grads, self.is_trained, self.is_apart)), strict=True)
        squares = [
            _by_layer(leaf) if is_apart else _square(leaf) for leaf, is_trained, is_apart in leaves if is_trained
        ]
        return jnp.sqrt(sum(squares, jnp.float32(0)))


def _square(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


def _by_layer(stack: jax.Array) -> jax.Array:
    """Rows of each layer first, so that what is left to sum is small, and one sum for all layers."""
    layers = (stack[i].reshape(stack.shape[1], -1).astype(jnp.float32) for i in range(stack.shape[0]))
    return jnp.sum(reduce(jnp.add, [jnp.sum(jnp.square(layer), axis=1) for layer in layers]))


def clipped(grads: Tree, norm: jax.Array, limit: float) -> Tree:
    """The gradients, scaled down to a norm of `limit` where theirs is larger (Pascanu et al., 2012)."""
    return jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm) * limit), grads)
