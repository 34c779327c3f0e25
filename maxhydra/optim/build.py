"""Build the optax transformation of a config.Optimizer: clipping, scaling, decoupled weight decay, learning rate.

All arithmetic is float32 whatever the dtype of the weights; the state keeps its own dtypes. The learning rate depends
on the number of applied updates in the state, so a step whose new state is discarded does not advance the schedule.

`state_axes` gives the state the logical axes of its parameters, so that it is sharded like them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxhydra.config.plug_ins import call_plug_in
from maxhydra.config.schema.optimizer import MomentFormat, OptimizerKind
from maxhydra.config.schema.optimizer import Optimizer as OptimizerConfig
from maxhydra.config.values import matches_any
from maxhydra.optim.adafactor import Factored, scale_by_adafactor
from maxhydra.optim.adam8 import Quantized, scale_by_adam8
from maxhydra.optim.averages import Averaging, ExponentialAverage, ScheduleFreeAverage, start_average
from maxhydra.optim.muon import orthogonal_momentum
from maxhydra.optim.parameters import (
    axes_by_path,
    check_patterns,
    is_stacked,
    layer_matrices,
    matrix_dims,
    partition_matrices,
    path_of,
    paths,
)
from maxhydra.optim.schedule import Schedule, schedule
from maxhydra.optim.soap import Bases, SoapRule, bases_axes, scale_by_soap
from maxhydra.optim.sparsity import pruned_axes, with_sparsity
from maxhydra.sharding import LogicalAxes, Sharder, is_axes

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


class OptimizerState(NamedTuple):
    """Number of applied updates, the state of the inner transformations, and an average of the weights.

    `average` is an `Average`, or None; `sparse` is `SparseWeights`, or None.
    """

    applied: jax.Array
    inner: Tree
    average: Tree = None
    sparse: Tree = None


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
    rates_by_path: Mapping[str, float | np.ndarray] = dataclasses.field(default_factory=dict)
    """The same by path: a number, or an array that broadcasts over the parameter."""
    decays_by_path: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Weight decay relative to that of the config, by path."""


def build(
    config: OptimizerConfig,
    *,
    steps: int,
    shapes: Tree,
    axes: Tree,
    is_unrolled: bool = False,
    rules: PathRules = PathRules(),
    sharder: Sharder | None = None,
) -> Optimizer:
    """Build the optimizer for parameters with these shapes and logical axes, over a run of `steps` steps.

    `is_unrolled`: the layer loop is unrolled, so gradients of stacked layers are computed layer by layer.
    `sharder`: that of the parameters; None for one device.
    """
    names = paths(shapes)
    check_patterns(config.trainable, config.no_decay, list(config.rate_ratios), jax.tree.leaves(names))
    axes_of = axes_by_path(axes)
    transforms = [("scale", _SCALINGS[config.kind](config, axes_of, sharder or Sharder.single()))]
    if any(decays := _decays(config, axes_of, rules)):
        transforms.append(("decay", _add_decay(decays, is_cautious=config.cautious_decay)))
    if ratios := _ratios(config, list(axes_of), rules):
        transforms.append(("ratio", _multiply(ratios)))

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
    averaging = _averaging(config)
    transform = _scale_by_schedule(inner, learning_rate, norm, config.clip_norm)
    if config.sparsity.n is not None:
        transform = with_sparsity(transform, config.sparsity, pruned_axes(config.sparsity, axes_of, shapes))
    return Optimizer(
        transform if averaging is None else _with_average(transform, averaging, learning_rate, is_trained),
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
        return jax.tree.map(lambda u: rate * u, updates), state._replace(applied=state.applied + 1, inner=stored)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_average(
    inner: optax.GradientTransformationExtraArgs, averaging: Averaging, learning_rate: Schedule, is_trained: Tree
) -> optax.GradientTransformationExtraArgs:
    """Let the changes that `inner` makes to the weights enter their average."""

    def init(params: Tree) -> OptimizerState:
        return inner.init(params)._replace(average=start_average(params, is_trained))

    def update(grads: Tree, state: OptimizerState, params: Tree, **extra: jax.Array) -> tuple[Tree, OptimizerState]:
        changes, new = inner.update(grads, state, params, **extra)
        params_f32 = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        rate = extra["learning_rate"] if "learning_rate" in extra else learning_rate(state.applied)
        updates, average = averaging(changes, state.average, params_f32, rate)
        return updates, new._replace(average=average)

    return optax.GradientTransformationExtraArgs(init, update)


def _averaging(config: OptimizerConfig) -> Averaging | None:
    if config.kind is OptimizerKind.schedule_free:
        assert config.b1 is not None
        return ScheduleFreeAverage(config.b1)
    return None if config.ema_decay is None else ExponentialAverage(config.ema_decay)


def _decays(config: OptimizerConfig, axes: "Axes", rules: PathRules) -> dict[str, float]:
    """Weight decay of the parameters that have any, by path."""
    matrices = layer_matrices(axes) if config.matrix_weight_decay is not None else {}
    decays = {}
    for path in axes:
        own = config.matrix_weight_decay if path in matrices else None
        decay = (config.weight_decay if own is None else own) * rules.decays_by_path.get(path, 1.0)
        if decay and not matches_any((*config.no_decay, *rules.undecayed), path):
            decays[path] = decay
    return decays


def _add_decay(decays: Mapping[str, float], *, is_cautious: bool) -> optax.GradientTransformation:
    """Add decayed weights to the updates; cautiously (Chen et al., 2025) only where both move a weight towards zero."""

    def add(keys: jax.tree_util.KeyPath, update: jax.Array, param: jax.Array) -> jax.Array:
        decay = decays.get(path_of(keys), 0.0)
        if not decay:
            return update
        decayed = decay * param
        return update + (jnp.where(update * param > 0, decayed, 0) if is_cautious else decayed)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(add, updates, params))


def _ratios(config: OptimizerConfig, known: list[str], rules: PathRules) -> dict[str, float | np.ndarray]:
    """Learning rates relative to that of the config, of the parameters that have another, by path."""
    ratios = dict(rules.rates_by_path)
    for pattern, ratio in (*rules.rate_ratios.items(), *config.rate_ratios.items()):
        for path in known:
            if matches_any([pattern], path):
                ratios[path] = ratios.get(path, 1.0) * ratio
    return ratios


def _multiply(ratios: Mapping[str, float | np.ndarray]) -> optax.GradientTransformation:
    def scale(keys: jax.tree_util.KeyPath, update: jax.Array) -> jax.Array:
        ratio = ratios.get(path_of(keys))
        return update if ratio is None else update * ratio

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


Axes = dict[str, LogicalAxes]


def _adamw(config: OptimizerConfig, axes: Axes, sharder: Sharder) -> optax.GradientTransformation:
    if config.moments is MomentFormat.dynamic8:
        assert config.b1 is not None and config.b2 is not None and config.eps is not None
        return scale_by_adam8(axes, b1=config.b1, b2=config.b2, eps=config.eps, eps_root=config.eps_root or 0.0)
    return optax.scale_by_adam(
        b1=config.b1, b2=config.b2, eps=config.eps, eps_root=config.eps_root or 0.0, mu_dtype=_mu_dtype(config)
    )


def _lion(config: OptimizerConfig, axes: Axes, sharder: Sharder) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=config.b1, b2=config.b2, mu_dtype=_mu_dtype(config))


def _sgd(config: OptimizerConfig, axes: Axes, sharder: Sharder) -> optax.GradientTransformation:
    return optax.trace(decay=config.momentum, accumulator_dtype=_mu_dtype(config))


def _adafactor(config: OptimizerConfig, axes: Axes, sharder: Sharder) -> optax.GradientTransformation:
    assert config.b2_decay is not None and config.eps is not None and config.min_dim_factored is not None
    return scale_by_adafactor(axes, b2_decay=config.b2_decay, eps=config.eps, min_dim=config.min_dim_factored)


def _muon(config: OptimizerConfig, axes: Axes, sharder: Sharder) -> optax.GradientTransformation:
    return orthogonal_momentum(config, axes, _adamw(config, axes, sharder))


def _soap(config: OptimizerConfig, axes: Axes, sharder: Sharder) -> optax.GradientTransformation:
    rule = SoapRule(config.b1, config.b2, config.eps, config.precondition_every, config.precondition_max_dim)  # type: ignore[arg-type]
    return partition_matrices(
        "soap", scale_by_soap(axes, rule, sharder), _adamw(config, axes, sharder), layer_matrices(axes)
    )


def _schedule_free(config: OptimizerConfig, axes: Axes, sharder: Sharder) -> optax.GradientTransformation:
    """AdamW without a first moment, whose part the average of the weights takes."""
    return optax.scale_by_rms(decay=config.b2, eps=config.eps, eps_in_sqrt=False, bias_correction=True)


def _function(config: OptimizerConfig, axes: Axes, sharder: Sharder) -> optax.GradientTransformation:
    assert config.function is not None
    return call_plug_in(config.function, options=config.options, key="optimizer.function")


def _mu_dtype(config: OptimizerConfig) -> str | None:
    return config.mu_dtype.value if config.mu_dtype else None


_SCALINGS: dict[OptimizerKind, Callable[[OptimizerConfig, Axes, Sharder], optax.GradientTransformation]] = {
    OptimizerKind.adamw: _adamw,
    OptimizerKind.adafactor: _adafactor,
    OptimizerKind.sgd: _sgd,
    OptimizerKind.muon: _muon,
    OptimizerKind.lion: _lion,
    OptimizerKind.soap: _soap,
    OptimizerKind.schedule_free: _schedule_free,
    OptimizerKind.function: _function,
}


def state_axes(optimizer: Optimizer, shapes: Tree, axes: Tree) -> Tree:
    """A tree with the structure of `transform.init`'s result and the logical axes of each leaf.

    Every tree of moments has the keys of the parameters, so the end of a leaf's path names its parameter. A moment has
    its parameter's axes, as have the codes and scales of a quantized one; a factored one has the axes of its side
    of the matrix, a basis those of both; counts and constants are replicated.
    """
    state = jax.eval_shape(optimizer.transform.init, shapes)
    by_keys = {
        keys: (path_of(keys), names) for keys, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    }
    shape_of = {path_of(keys): leaf.shape for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes)}

    def axes_of_leaf(keys: jax.tree_util.KeyPath, leaf: Any) -> LogicalAxes | Factored | Quantized | Bases:
        parameter = next((by_keys[keys[i:]] for i in range(len(keys)) if keys[i:] in by_keys), None)
        if parameter is None:
            return (None,) * len(leaf.shape)
        path, names = parameter
        if isinstance(leaf, Factored):
            return _factored_axes(names)
        if isinstance(leaf, Quantized):
            return Quantized(names, names)  # type: ignore[arg-type]
        if isinstance(leaf, Bases):
            return bases_axes(leaf, names)
        sizes = list(zip(leaf.shape, shape_of[path], strict=False))
        if len(leaf.shape) != len(shape_of[path]) or any(size not in (1, whole) for size, whole in sizes):
            raise ValueError(f"{path_of(keys)} has shape {leaf.shape}, its parameter {path} has {shape_of[path]}")
        # A dimension over which a moment is reduced has size 1.
        return tuple(name if size == whole else None for name, (size, whole) in zip(names, sizes, strict=True))

    return jax.tree_util.tree_map_with_path(
        axes_of_leaf, state, is_leaf=lambda node: isinstance(node, (Factored, Quantized, Bases))
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
