"""Cross-entropy over the head's logits, as sums that add up over chunks, micro-batches and devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.kernels.linear_cross_entropy import linear_cross_entropy
from maxhydra.kernels.placement import Placement
from maxhydra.layers.kernel_options import KernelChoice, kernel_errors_as_config_errors

# Arrays that add up over micro-batches, by name; `told` among them is a tree of such.
Sums = dict[str, Any]


def cross_entropy(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float,
    chunk: int,
    wanted: KernelChoice,
    place: Placement | None = None,
) -> Sums:
    """Sums over tokens of weight, nll = logsumexp(z) - z[target], and loss = nll + z_loss * logsumexp(z)^2.

    `loss` is what is to be differentiated; `nll` and `weight` are constants to that.
    """
    with jax.named_scope("loss"), kernel_errors_as_config_errors():
        loss, nll = linear_cross_entropy(
            logits_of, hidden, targets, weights, z_loss=z_loss, chunk=chunk, **wanted._asdict(), place=place
        )
        return {"loss": loss, "nll": nll, "weight": jax.lax.stop_gradient(jnp.sum(weights))}


Tree = Any
# Among the sums: losses of layers, which are part of the loss; and the tree of what else layers tell.
SIDE_LOSS, TOLD = "side_loss", "told"


def add_aux_losses(sums: Sums, sides: Tree) -> Sums:
    """The sums of a loss, with what the layers of its forward pass told.

    Where layers have losses, means over the batch, the loss has them too: sums are divided by the weight later on.
    """
    found = jax.tree_util.tree_leaves_with_path(sides)
    losses = [jnp.sum(leaf) for keys, leaf in found if keys[-1].key == "loss"]
    told = jax.lax.stop_gradient(_without_losses(sides))
    added: Sums = {TOLD: told} if told else {}
    if losses:
        side = sums["weight"] * sum(losses[1:], losses[0])
        added |= {"loss": sums["loss"] + side, SIDE_LOSS: jax.lax.stop_gradient(side)}
    return {**sums, **added}


def load_metrics(told: Tree) -> dict[str, jax.Array]:
    """The load of the busiest expert over the mean, in the layer where that is worst; nothing without experts."""
    found = jax.tree_util.tree_leaves_with_path(told)
    ratios = [_unevenness(leaf) for keys, leaf in found if keys[-1].key == "load"]
    return {"moe/load_max_mean": jnp.max(jnp.stack(ratios))} if ratios else {}


def _unevenness(load: jax.Array) -> jax.Array:
    return jnp.max(jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-6))


def _without_losses(tree: Tree) -> Tree:
    """The tree without leaves called `loss`, and without branches that then are empty."""
    if not isinstance(tree, dict):
        return tree
    kept = {name: _without_losses(below) for name, below in tree.items() if name != "loss"}
    return {name: below for name, below in kept.items() if not isinstance(below, dict) or below}
