"""config.Optimizer -> one optax transformation: clip, the kind's scaling, decoupled decay, learning rate.

All arithmetic is float32 whatever the format of the weights; the state is stored in its own formats. The learning rate
depends on the number of updates that the state has seen, so a step whose new state is thrown away does not count.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from maxhydra.config.regex import matches
from maxhydra.config.schema.optimizer import Optimizer as OptimizerConfig
from maxhydra.config.schema.optimizer import OptimizerKind
from maxhydra.optim.adafactor import scale_by_adafactor
from maxhydra.optim.norm import Norm, clipped
from maxhydra.optim.parameters import Sides, axes_by_path, check_patterns, is_stacked, is_table, path_of, paths, sides
from maxhydra.optim.schedule import Schedule, schedule
from maxhydra.sharding import LogicalAxes

Tree = Any

# Root mean square of adamw's updates in practice: with it muon's matrices and adamw's vectors share one learning rate
# and one weight decay (Liu et al., 2025, "Muon is scalable for LLM training").
ADAM_RMS = 0.2


class OptimizerState(NamedTuple):
    """Updates applied so far, and the state of the transformations."""

    applied: jax.Array
    inner: Tree


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """`transform` turns gradients into updates to add; `schedule(applied)` is the learning rate of the next one.

    `norm` is that of gradients, by which the transformation clips them; who has it at hand already may give it to
    `update` as `norm`.
    """

    transform: optax.GradientTransformation
    schedule: Schedule
    norm: Callable[[Tree], jax.Array] = optax.tree.norm
    is_trained: Tree = None
    """Of each parameter. None: all are."""

    def held(self, new: Tree, old: Tree) -> Tree:
        """New parameters, old ones where they are not trained: what a layer changes in itself stays there too."""
        if self.is_trained is None:
            return new
        return jax.tree.map(lambda is_trained, n, o: n if is_trained else o, self.is_trained, new, old)


def build(config: OptimizerConfig, *, steps: int, shapes: Tree, axes: Tree, is_written_out: bool = False) -> Optimizer:
    """The optimizer of parameters with these shapes and logical axes, over a run of `steps` steps.

    is_written_out: gradients of stacked layers are made layer by layer, in no loop.
    """
    names = paths(shapes)
    check_patterns(config.trainable, config.no_decay, jax.tree.leaves(names))
    own_axes = axes_by_path(axes)
    trained = [("scale", _SCALINGS[config.kind](config, own_axes))]
    if config.weight_decay > 0:
        decayed = jax.tree.map(lambda path: not matches(config.no_decay, path), names)
        trained.append(("decay", optax.add_decayed_weights(config.weight_decay, mask=decayed)))
    labels = jax.tree.map(lambda path: "trained" if matches(config.trainable, path) else "frozen", names)
    inner = optax.partition({"trained": optax.named_chain(*trained), "frozen": optax.set_to_zero()}, labels)
    learning_rate = schedule(config.schedule, peak=config.learning_rate, steps=steps)
    is_apart = jax.tree.map(
        lambda path: is_written_out and len(own_axes[path]) > 2 and is_stacked(own_axes[path]), names
    )
    is_trained = jax.tree.map(lambda label: label == "trained", labels)
    norm = Norm(is_trained=is_trained, is_apart=is_apart)
    return Optimizer(_descend(inner, learning_rate, norm, config.clip_norm), learning_rate, norm, is_trained)


def _descend(
    inner: optax.GradientTransformation, learning_rate: Schedule, norm: Norm, clip_norm: float | None
) -> optax.GradientTransformation:
    """Minus the learning rate times `inner` of the clipped gradients, computed in float32."""

    def init(params: Tree) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(grads: Tree, state: OptimizerState, params: Tree, **known: jax.Array) -> tuple[Tree, OptimizerState]:
        wide_grads, wide_params = (jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (grads, params))
        if clip_norm is not None:
            wide_grads = clipped(wide_grads, known["norm"] if known else norm(wide_grads), clip_norm)
        updates, new_inner = inner.update(wide_grads, state.inner, wide_params)
        rate = -learning_rate(state.applied)
        stored = jax.tree.map(lambda new, old: new.astype(old.dtype), new_inner, state.inner)
        return jax.tree.map(lambda u: rate * u, updates), OptimizerState(state.applied + 1, stored)

    return optax.GradientTransformationExtraArgs(init, update)


Axes = dict[str, LogicalAxes]


def _adamw(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=_mu_dtype(config))


def _lion(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=config.b1, b2=config.b2, mu_dtype=_mu_dtype(config))


def _sgd(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    return optax.trace(decay=config.momentum, accumulator_dtype=_mu_dtype(config))


def _adafactor(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    assert config.b2_decay is not None and config.eps is not None and config.min_dim_factored is not None
    return scale_by_adafactor(axes, b2_decay=config.b2_decay, eps=config.eps, min_dim=config.min_dim_factored)


def _muon(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
    """Orthogonalised momentum for the layers' matrices; adamw for embeddings, head, norms and biases.

    `optax.contrib.muon` composes the same parts, but cannot mask the decay of its adamw half.
    """
    matrices = {path: sides(names) for path, names in axes.items() if not is_table(names)}
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


def _match_adam_rms(matrices: dict[str, Sides]) -> optax.GradientTransformation:
    """An orthogonal n x m matrix has a root mean square of 1 / sqrt(max(n, m)); bring it to ADAM_RMS."""

    def scale(keys: jax.tree_util.KeyPath, update: jax.Array) -> jax.Array:
        matrix = matrices[path_of(keys)]
        longest = max(math.prod(update.shape[d] for d in side) for side in (matrix.rows, matrix.columns))
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
