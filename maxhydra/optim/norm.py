"""Global gradient norm over the trained parameters, and clipping to it."""

import dataclasses
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@dataclasses.dataclass(frozen=True)
class GradNorm:
    """L2 norm in float32 over the trained leaves."""

    is_trained: Tree
    """Tree of bools, one per leaf."""
    is_per_layer: Tree
    """True for a leaf of stacked layers whose loop is unrolled, so that gradients come layer by layer: XLA would
    concatenate them before the sum, at a third of the memory bandwidth."""

    def __call__(self, grads: Tree) -> jax.Array:
        leaves = zip(*map(jax.tree.leaves, (grads, self.is_trained, self.is_per_layer)), strict=True)
        squares = [
            _sum_squares_by_layer(leaf) if is_per_layer else _sum_squares(leaf)
            for leaf, is_trained, is_per_layer in leaves
            if is_trained
        ]
        return jnp.sqrt(sum(squares, jnp.float32(0)))


def _sum_squares(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


def _sum_squares_by_layer(stack: jax.Array) -> jax.Array:
    """Reduce each layer to its rows first, then sum the small remainder over all layers at once."""
    layers = (stack[i].reshape(stack.shape[1], -1).astype(jnp.float32) for i in range(stack.shape[0]))
    return jnp.sum(reduce(jnp.add, [jnp.sum(jnp.square(layer), axis=1) for layer in layers]))


def clip_to_norm(grads: Tree, norm: jax.Array, limit: float) -> Tree:
    """Scale the gradients down to a norm of `limit` if `norm` is larger (Pascanu et al., 2012)."""
    return jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm) * limit), grads)
