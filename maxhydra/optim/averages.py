"""Averages of the weights that are evaluated, saved and exported in place of the trained ones.

An average receives the changes that the optimizer makes to the weights. It decides what is added to the trained
weights, and updates its own copy in float32.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

Tree = Any


class Average(NamedTuple):
    """Averaged weights, masked where they are not trained, and the sum and the maximum of their weights so far."""

    params: Tree
    total: jax.Array
    largest: jax.Array


class Averaging(Protocol):
    """How changes of the weights enter the average: returns the updates of the weights and the new average."""

    def __call__(self, changes: Tree, old: Average, params: Tree, rate: jax.Array) -> tuple[Tree, Average]: ...


def start_average(params: Tree, is_trained: Tree) -> Average:
    """An average that starts at the initial weights, as a copy, because the step donates both."""

    def copy(is_trained: bool, param: jax.Array) -> Any:
        return jnp.array(param, jnp.float32, copy=True) if is_trained else optax.MaskedNode()

    zero = jnp.zeros((), jnp.float32)
    return Average(jax.tree.map(copy, is_trained, params), zero, zero)


@dataclasses.dataclass(frozen=True)
class ExponentialAverage:
    """Exponential moving average (Polyak and Juditsky, 1992).

    After n updates the decay is at most (1 + n) / (10 + n), so that the initial weights soon lose their share.
    """

    decay: float

    def __call__(self, changes: Tree, old: Average, params: Tree, rate: jax.Array) -> tuple[Tree, Average]:
        decay = jnp.minimum(self.decay, (1 + old.total) / (10 + old.total))

        def blend(average: jax.Array, param: jax.Array, change: jax.Array) -> jax.Array:
            return average + (1 - decay) * (param + change - average)

        new = _map_trained(blend, old.params, params, changes)
        return changes, Average(new, old.total + 1, old.largest)


@dataclasses.dataclass(frozen=True)
class ScheduleFreeAverage:
    """Schedule-free learning (Defazio et al., 2024): gradients are taken between the iterate z and the average x of z.

    The trained weights are y = (1 - b1) z + b1 x. Steps are weighted in x by the square of the largest rate so far.
    y and x are stored; z follows from them.
    """

    b1: float

    def __call__(self, changes: Tree, old: Average, params: Tree, rate: jax.Array) -> tuple[Tree, Average]:
        largest = jnp.maximum(old.largest, rate)
        total = old.total + jnp.square(largest)
        share = jnp.where(total > 0, jnp.square(largest) / total, 0.0)

        def blend(average: jax.Array, param: jax.Array, change: jax.Array) -> jax.Array:
            iterate = (param - self.b1 * average) / (1 - self.b1) + change
            return average + share * (iterate - average)

        new = _map_trained(blend, old.params, params, changes)

        def move(average: jax.Array, before: jax.Array, change: jax.Array) -> jax.Array:
            # y' - y = (1 - b1) (z' - z) + b1 (x' - x)
            return (1 - self.b1) * change + self.b1 * (average - before)

        return _map_trained(move, new, old.params, changes, other=changes), Average(new, total, largest)


def _map_trained(function: Any, average: Tree, *trees: Tree, other: Tree = None) -> Tree:
    """Map over the trained leaves; the others are masked, or those of `other`."""

    def apply(leaf: Any, *rest: Any) -> Any:
        *inputs, default = rest
        return default if isinstance(leaf, optax.MaskedNode) else function(leaf, *inputs)

    default = average if other is None else other
    return jax.tree.map(apply, average, *trees, default, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


def exchange(average: Average, params: Tree) -> tuple[Tree, Average]:
    """Exchange trained weights and their average, so that the average is in the place of the weights."""
    weights = _map_trained(lambda leaf: leaf, average.params, other=params)
    trained = _map_trained(lambda _, param: param, average.params, params)
    return weights, average._replace(params=trained)
