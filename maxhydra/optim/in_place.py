"""Weights that a kernel updates in their place; all others are optax's.

XLA makes one pass of an update where a gradient is one array. Those of layers that are written out come one by one, and
XLA, joining them on the way, reads them, the moments and the weights once for each of the three results.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config import ConfigError, Problem
from maxhydra.config.optimizer import Optimizer as OptimizerConfig
from maxhydra.config.optimizer import OptimizerKind, UpdateBackend
from maxhydra.kernels.adamw import BACKENDS, Call, Held, Now, Rule
from maxhydra.kernels.place import Place
from maxhydra.optim.norm import clip_scale
from maxhydra.optim.parameters import own_keys

Tree = Any
Keys = jax.tree_util.KeyPath
# The backend that is worth leaving optax's path for.
KERNEL = "triton"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a step knows when it comes to its update."""

    weight: jax.Array
    """Of its tokens, by which gradients are divided."""
    norm: jax.Array
    """Of the gradients, so divided."""
    applied: jax.Array
    """Updates before this one."""
    rate: jax.Array
    """The learning rate."""
    apply: jax.Array
    """Whether the update is made."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A weight that the kernel updates."""

    rule: Rule
    parts: int
    """In which its gradient comes: the layers stacked on its first axis, or one."""


@dataclasses.dataclass(frozen=True)
class InPlace:
    """The update of some weights, `leaves` by their keys among the parameters, and of their moments."""

    leaves: Mapping[Keys, Leaf] = dataclasses.field(default_factory=dict)
    clip_norm: float | None = None
    backend: str = KERNEL

    def rest(self, tree: Tree) -> Tree:
        """A tree with nothing in the places of these weights, over which an optimizer may go as ever."""

        def emptied(path: Keys, array: jax.Array) -> jax.Array:
            return array if own_keys(path, self.leaves) is None else jnp.zeros((0,), array.dtype)

        return jax.tree_util.tree_map_with_path(emptied, tree) if self.leaves else tree

    def filled(self, rest: Tree, before: Tree, grads: Tree, measured: Measured) -> Tree:
        """`rest` of new weights and moments with these among them, made of those `before`.

        Both are mappings: the parameters lie under `weight`, and in the optimizer's state moments under `mu` and `nu`.
        """
        if not self.leaves:
            return rest
        old: dict[Keys, dict[str, jax.Array]] = {keys: {} for keys in self.leaves}
        for path, array in jax.tree_util.tree_leaves_with_path(before):
            if (keys := own_keys(path, self.leaves)) is not None:
                old[keys][_role(path, keys)] = array
        of_keys = dict(jax.tree_util.tree_leaves_with_path(grads))
        new = {
            keys: self._updated(leaf, Held(**old[keys]), of_keys[keys], measured) for keys, leaf in self.leaves.items()
        }

        def placed(path: Keys, array: jax.Array) -> jax.Array:
            keys = own_keys(path, self.leaves)
            return array if keys is None else getattr(new[keys], _role(path, keys))

        return jax.tree_util.tree_map_with_path(placed, rest)

    def _updated(self, leaf: Leaf, held: Held, grad: jax.Array, measured: Measured) -> Held:
        count = (measured.applied + 1).astype(jnp.float32)
        now = Now(
            scale=clip_scale(measured.norm, self.clip_norm) / measured.weight,
            rate=measured.rate,
            mu_scale=1 / (1 - leaf.rule.b1**count),
            nu_scale=1 / (1 - leaf.rule.b2**count),
            apply=measured.apply,
        )
        parts = [grad[i] for i in range(leaf.parts)] if leaf.parts > 1 else [grad]
        return BACKENDS[self.backend].run(held, parts, now, leaf.rule)


def _role(path: Keys, keys: Keys) -> str:
    """The name of the tree that repeats the parameters' keys."""
    return jax.tree_util.keystr(path[-len(keys) - 1 : -len(keys)], simple=True)


def plan(
    config: OptimizerConfig, shapes: Tree, *, is_apart: Tree, is_decayed: Tree, is_trained: Tree, place: Place
) -> InPlace:
    """The weights that the kernel can update. The trees say of each whether the gradients of its layers come one by
    one, whether it decays, and whether it is trained."""
    if config.kind is not OptimizerKind.adamw or config.backend is UpdateBackend.xla:
        return InPlace()
    assert config.b1 is not None and config.b2 is not None and config.eps is not None
    leaves, reasons = {}, {}
    flags = map(jax.tree.leaves, (is_apart, is_decayed, is_trained))
    of_each = zip(jax.tree_util.tree_leaves_with_path(shapes), *flags, strict=True)
    for (keys, shape), apart, decayed, trained in of_each:
        parts = shape.shape[0] if apart else 1
        call = Call(
            platform=place.platform, devices=place.devices, dtype=shape.dtype.name, size=shape.size, parts=parts
        )
        reasons[shape.size] = BACKENDS[KERNEL].refusals(call)
        if trained and not reasons[shape.size]:
            leaves[keys] = Leaf(Rule(config.b1, config.b2, config.eps, config.weight_decay * decayed), parts)
    if config.backend is UpdateBackend.triton and not leaves:
        reason = f"cannot update any of the weights: {'; '.join(reasons[max(reasons)])}"
        raise ConfigError(Problem("optimizer.backend", reason, value=KERNEL, accepted="auto, xla"))
    return InPlace(leaves, config.clip_norm)
