"""Build the optax transformation of a config.Optimizer: clipping, scaling, decoupled weight decay, learning rate.

All arithmetic is float32 whatever the dtype of the weights; the state keeps its own dtypes. The learning rate depends
on the number of applied updates in the state, so a step whose new state is discarded does not advance the schedule.

`state_axes` gives the state the logical axes of its parameters, so that it is sharded like them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from maxhydra.config.schema.optimizer import MomentFormat, OptimizerKind
from maxhydra.config.schema.optimizer import Optimizer as OptimizerConfig
from maxhydra.config.values import matches_any
from maxhydra.optim.adafactor import Factored, scale_by_adafactor
from maxhydra.optim.adam8 import Quantized, scale_by_adam8
from maxhydra.optim.parameters import (
    MatrixDims,
    axes_by_path,
    check_patterns,
    is_stacked,
    is_table,
    matrix_dims,
    path_of,
    paths,
)
from maxhydra.optim.schedule import Schedule, schedule
from maxhydra.sharding import LogicalAxes, is_axes

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


# Typical RMS of AdamW updates. Muon updates are scaled to it, so that Muon's matrices and AdamW's vectors share one
# learning rate and weight decay (Liu et al., 2025, "Muon is scalable for LLM training").
ADAM_RMS = 0.2


class OptimizerState(NamedTuple):
    """Number of applied updates, and the state of the inner transformations."""

    applied: jax.Array
    inner: Tree


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """`transform` converts gradients to updates to add; `schedule(applied)` is the learning rate of the next update.

    `norm` is the gradient norm by which `transform` clips; a caller that has already computed it can pass it to
    `transform.update` as `norm`.
    """

    transform: optax.GradientTransformation
    schedule: Schedule
    norm: Callable[[Tree], jax.Array] = optax.tree.norm
    is_trained: Tree = None
    """Tree of bools, one per parameter; None if all are trained."""
    grad_dtype: str | None = None
    """Dtype of the gradients; None: that of the weights to add up, that of the backward pass otherwise."""

    def restore_frozen(self, new: Tree, old: Tree) -> Tree:
        """Replace frozen parameters in `new` by those in `old`, also where a layer updates itself (router bias)."""
        if self.is_trained is None:
            return new
        return jax.tree.map(lambda is_trained, n, o: n if is_trained else o, self.is_trained, new, old)


@dataclasses.dataclass(frozen=True)
class PathRules:
    """Parameters that are treated differently, as regular expressions on their paths."""

    constant: Sequence[str] = ()
    """Not trained."""
    undecayed: Sequence[str] = ()
    """Without weight decay, in addition to those of the config."""
    rate_ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Learning rate relative to that of the other parameters."""


def build(
    config: OptimizerConfig,
    *,
    steps: int,
    shapes: Tree,
    axes: Tree,
    is_unrolled: bool = False,
    rules: PathRules = PathRules(),
) -> Optimizer:
    """Build the optimizer for parameters with these shapes and logical axes, over a run of `steps` steps.

    `is_unrolled`: the layer loop is unrolled, so gradients of stacked layers are computed layer by layer.
    """
    names = paths(shapes)
    check_patterns(config.trainable, config.no_decay, jax.tree.leaves(names))
    axes_of = axes_by_path(axes)
    transforms = [("scale", _SCALINGS[config.kind](config, axes_of))]
    if config.weight_decay > 0:
        undecayed = (*config.no_decay, *rules.undecayed)
        decayed = jax.tree.map(lambda path: not matches_any(undecayed, path), names)
        transforms.append(("decay", optax.add_decayed_weights(config.weight_decay, mask=decayed)))
    transforms += [
        (f"ratio_{number}", optax.masked(optax.scale(ratio), jax.tree.map(partial(matches_any, [pattern]), names)))
        for number, (pattern, ratio) in enumerate(rules.rate_ratios.items())
    ]

    def label(path: str) -> str:
        is_trained = matches_any(config.trainable, path) and not matches_any(rules.constant, path)
        return "trained" if is_trained else "frozen"

    labels = jax.tree.map(label, names)
    inner = optax.partition({"trained": optax.named_chain(*transforms), "frozen": optax.set_to_zero()}, labels)
    learning_rate = schedule(config.schedule, peak=config.learning_rate, steps=steps)
    is_per_layer = jax.tree.map(
        lambda path: is_unrolled and len(axes_of[path]) > 2 and is_stacked(axes_of[path]), names
    )
    is_trained = jax.tree.map(lambda label: label == "trained", labels)
    norm = GradNorm(is_trained=is_trained, is_per_layer=is_per_layer)
    return Optimizer(
        _scale_by_schedule(inner, learning_rate, norm, config.clip_norm),
        learning_rate,
        norm,
        is_trained,
        grad_dtype=config.grad_dtype.value if config.grad_dtype else None,
    )


def _scale_by_schedule(
    inner: optax.GradientTransformation, learning_rate: Schedule, norm: GradNorm, clip_norm: float | None
) -> optax.GradientTransformation:
    """Minus the learning rate times `inner` of the clipped gradients, computed in float32."""

    def init(params: Tree) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(grads: Tree, state: OptimizerState, params: Tree, **extra: jax.Array) -> tuple[Tree, OptimizerState]:
        grads_f32, params_f32 = (jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (grads, params))
        if clip_norm is not None:
            grads_f32 = clip_to_norm(grads_f32, extra["norm"] if "norm" in extra else norm(grads_f32), clip_norm)
        updates, new_inner = inner.update(grads_f32, state.inner, params_f32)
        # The training step passes the rate that it logs; both count applied updates.
        rate = -(extra["learning_rate"] if "learning_rate" in extra else learning_rate(state.applied))
        stored = jax.tree.map(lambda new, old: new.astype(old.dtype), new_inner, state.inner)
        return jax.tree.map(lambda u: rate * u, updates), OptimizerState(state.applied + 1, stored)

    return optax.GradientTransformationExtraArgs(init, update)


Axes = dict[str, LogicalAxes]


def _adamw(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    if config.moments is MomentFormat.dynamic8:
        assert config.b1 is not None and config.b2 is not None and config.eps is not None
        return scale_by_adam8(axes, b1=config.b1, b2=config.b2, eps=config.eps, eps_root=config.eps_root or 0.0)
    return optax.scale_by_adam(
        b1=config.b1, b2=config.b2, eps=config.eps, eps_root=config.eps_root or 0.0, mu_dtype=_mu_dtype(config)
    )


def _lion(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=config.b1, b2=config.b2, mu_dtype=_mu_dtype(config))


def _sgd(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    return optax.trace(decay=config.momentum, accumulator_dtype=_mu_dtype(config))


def _adafactor(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    assert config.b2_decay is not None and config.eps is not None and config.min_dim_factored is not None
    return scale_by_adafactor(axes, b2_decay=config.b2_decay, eps=config.eps, min_dim=config.min_dim_factored)


def _muon(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    """Orthogonalized momentum for the layers' matrices; AdamW for embeddings, head, norms and biases.

    `optax.contrib.muon` composes the same transformations, but cannot mask the weight decay of its AdamW half.
    """
    matrices = {path: matrix_dims(names) for path, names in axes.items() if not is_table(names)}
    dimensions = {path: MuonDimensionNumbers(m.rows, m.columns) for path, m in matrices.items() if m is not None}

    def dimensions_of(updates: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda keys, _: dimensions[path_of(keys)], updates)

    def labels(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda keys, _: _label(path_of(keys) in dimensions), params)

    orthogonal = scale_by_muon(
        ns_steps=config.newton_schulz_steps,
        beta=config.momentum,
        eps=config.eps,
        mu_dtype=_mu_dtype(config),
        weight_dimension_numbers=dimensions_of,
    )
    matched = _match_adam_rms({path: m for path, m in matrices.items() if m is not None})
    return optax.partition({"muon": optax.chain(orthogonal, matched), "adamw": _adamw(config, axes)}, labels)


def _label(is_matrix: bool) -> str:
    return "muon" if is_matrix else "adamw"


def _match_adam_rms(matrices: dict[str, MatrixDims]) -> optax.GradientTransformation:
    """Scale updates to ADAM_RMS; an orthogonal n x m matrix has an RMS of 1 / sqrt(max(n, m))."""

    def scale(keys: jax.tree_util.KeyPath, update: jax.Array) -> jax.Array:
        matrix = matrices[path_of(keys)]
        longest = max(math.prod(update.shape[d] for d in dims) for dims in (matrix.rows, matrix.columns))
        return update * (ADAM_RMS * math.sqrt(longest))

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


def _mu_dtype(config: OptimizerConfig) -> str | None:
    return config.mu_dtype.value if config.mu_dtype else None


_SCALINGS: dict[OptimizerKind, Callable[[OptimizerConfig, Axes], optax.GradientTransformation]] = {
    OptimizerKind.adamw: _adamw,
    OptimizerKind.adafactor: _adafactor,
    OptimizerKind.sgd: _sgd,
    OptimizerKind.muon: _muon,
    OptimizerKind.lion: _lion,
}


def state_axes(optimizer: Optimizer, shapes: Tree, axes: Tree) -> Tree:
    """A tree with the structure of `transform.init`'s result and the logical axes of each leaf.

    Every tree of moments has the keys of the parameters, so the end of a leaf's path names its parameter. A moment has
    its parameter's axes, as have the codes and scales of a quantized one; a factored one has the axes of its remaining
    dimensions; counts and constants are replicated.
    """
    state = jax.eval_shape(optimizer.transform.init, shapes)
    by_keys = {
        keys: (path_of(keys), names) for keys, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    }
    shape_of = {path_of(keys): leaf.shape for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes)}

    def axes_of_leaf(keys: jax.tree_util.KeyPath, leaf: Any) -> LogicalAxes | Factored | Quantized:
        parameter = next((by_keys[keys[i:]] for i in range(len(keys)) if keys[i:] in by_keys), None)
        if parameter is None:
            return (None,) * len(leaf.shape)
        path, names = parameter
        if isinstance(leaf, Factored):
            return _factored_axes(names)
        if isinstance(leaf, Quantized):
            return Quantized(names, names)  # type: ignore[arg-type]
        if leaf.shape != shape_of[path]:
            raise ValueError(f"{path_of(keys)} has shape {leaf.shape}, its parameter {path} has {shape_of[path]}")
        return names

    return jax.tree_util.tree_map_with_path(
        axes_of_leaf, state, is_leaf=lambda node: isinstance(node, (Factored, Quantized))
    )


def _factored_axes(names: LogicalAxes) -> Factored:
    """Row means have all dimensions except the columns', column means all except the rows'."""
    matrix = matrix_dims(names)
    assert matrix is not None
    rows, columns = (
        tuple(name for dimension, name in enumerate(names) if dimension not in dropped)
        for dropped in (matrix.columns, matrix.rows)
    )
    return Factored(rows=rows, columns=columns)  # type: ignore[arg-type]
