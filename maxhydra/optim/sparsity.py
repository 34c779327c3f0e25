"""N:M sparsity of weights in training: of every M consecutive inputs of an output, the N largest weights are kept.

The optimizer state holds the dense weights; the model's own weights are dense * mask. Gradients are computed at the
sparse weights and applied to all dense ones, pruned ones too (straight-through estimator, Bengio et al., 2013; Zhou et
al., 2021), so that a pruned weight can grow back when the masks are updated. Forward passes, checkpoints and exports
see sparse weights without knowing about masks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.optimizer import Sparsity
from maxhydra.config.values import matches_any
from maxhydra.optim.parameters import ACCEPTED, layer_matrices, path_of
from maxhydra.sharding import LogicalAxes

Tree = Any


class SparseWeights(NamedTuple):
    """Dense weights and masks of the pruned parameters; optax.MaskedNode for all others."""

    dense: Tree
    masks: Tree


def n_m_mask(weight: jax.Array, *, n: int, m: int, axis: int) -> jax.Array:
    """True for the n largest magnitudes of every m consecutive weights along an axis; the first one wins a tie."""
    shape = weight.shape
    size = jnp.abs(weight).reshape(*shape[:axis], shape[axis] // m, m, *shape[axis + 1 :])
    own, other = jnp.expand_dims(size, axis + 2), jnp.expand_dims(size, axis + 1)
    index = jnp.arange(m).reshape(m, *[1] * (len(shape) - axis - 1))
    is_earlier = jnp.expand_dims(index, 0) < jnp.expand_dims(index, 1)
    is_before = (other > own) | ((other == own) & is_earlier)
    rank = jnp.sum(is_before, axis=axis + 2)
    return (rank < n).reshape(shape)


def pruned_axes(sparsity: Sparsity, axes: dict[str, LogicalAxes], shapes: Tree) -> dict[str, int]:
    """The input dimension along which each pruned parameter is sparse, by path."""
    sizes = {path_of(keys): leaf.shape for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    matrices = {path: dims for path, dims in layer_matrices(axes).items() if path.endswith("/kernel")}
    found = {path: dims.rows[-1] for path, dims in matrices.items() if matches_any(sparsity.targets, path)}
    problems = []
    if not found:
        reason = "matches no matrix of a layer"
        problems.append(Problem("optimizer.sparsity.targets", reason, value=sparsity.targets, accepted=ACCEPTED))
    for path, axis in found.items():
        if sizes[path][axis] % (sparsity.m or 1):
            reason = f"does not divide the {sizes[path][axis]} inputs of {path}"
            problems.append(Problem("optimizer.sparsity.m", reason, value=sparsity.m, hint="change sparsity.targets"))
    if problems:
        raise ConfigError(problems)
    return found


def with_sparsity(
    inner: optax.GradientTransformationExtraArgs, sparsity: Sparsity, pruned: dict[str, int]
) -> optax.GradientTransformationExtraArgs:
    """Let `inner` update the dense weights, and the model's weights follow under the masks.

    The state of `inner` is an OptimizerState, whose field `sparse` this sets.
    """
    n, m = sparsity.n, sparsity.m
    assert n is not None and m is not None

    def select(function: Any, *trees: Tree) -> Tree:
        """Apply a function of path and leaves to the pruned parameters."""
        return jax.tree_util.tree_map_with_path(
            lambda keys, *leaves: function(path_of(keys), *leaves) if path_of(keys) in pruned else optax.MaskedNode(),
            *trees,
        )

    def init(params: Tree) -> Any:
        dense = select(lambda path, param: jnp.array(param, copy=True), params)
        masks = select(lambda path, param: jnp.ones(param.shape, jnp.bool_), params)
        return inner.init(params)._replace(sparse=SparseWeights(dense, masks))

    def update(grads: Tree, state: Any, params: Tree, **extra: jax.Array) -> tuple[Tree, Any]:
        old = state.sparse
        changes, new = inner.update(grads, state, _fill(old.dense, params), **extra)
        steps = new.applied - sparsity.start_step
        is_due = (steps >= 0) & (steps % sparsity.update_every == 0)
        dense = _map_pruned(lambda dense, change: (dense + change).astype(dense.dtype), old.dense, changes)

        def choose() -> Tree:
            return select(lambda path, weight: n_m_mask(weight, n=n, m=m, axis=pruned[path]), _fill(dense, params))

        masks = jax.lax.cond(is_due, choose, lambda: old.masks)
        targets = _map_pruned(lambda dense, mask: jnp.where(mask, dense, 0), dense, masks)
        moved = _map_pruned(lambda target, param: target.astype(jnp.float32) - param, targets, params)
        return _fill(moved, changes), new._replace(sparse=SparseWeights(dense, masks))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _map_pruned(function: Any, first: Tree, *rest: Tree) -> Tree:
    """Apply a function to the pruned parameters, which `first` has; the others stay masked."""
    return jax.tree.map(
        lambda leaf, *others: leaf if _is_masked(leaf) else function(leaf, *others), first, *rest, is_leaf=_is_masked
    )


def _fill(pruned: Tree, rest: Tree) -> Tree:
    """`rest`, with the pruned parameters from the other tree."""
    return jax.tree.map(lambda leaf, other: other if _is_masked(leaf) else leaf, pruned, rest, is_leaf=_is_masked)
