"""DiLoCo (Douillard et al., 2023): replicas train on their own data and are averaged every few steps.

Each replica, one index of the mesh axis `replica`, has its own parameters and optimizer state and takes ordinary steps
on its rows of the batch. Every `period` steps the difference between the shared parameters and the mean of the replicas
is the gradient of an outer step, SGD with Nesterov momentum, after which all replicas continue from the shared
parameters. With several fragments (Douillard et al., 2025) the layers are synchronized in turn, each once per period,
so that less is sent at a time. The last step of the run synchronizes everything.

Evaluation, samples and export use the shared parameters, which are `TrainState.params`; the replicas are part of the
optimizer state.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxhydra.config.schema.hardware import REPLICA
from maxhydra.config.schema.run import Diloco
from maxhydra.optim import is_stacked
from maxhydra.sharding import is_axes
from maxhydra.train.loss import ROW_VALUES, Batch, Tree
from maxhydra.train.state import DilocoState, TrainState
from maxhydra.train.step import Metrics, StepFn

# Metrics that are totals over the batch or counts; all others are means.
TOTALS, MAXIMA = ("tokens",), ("skipped", "halted")


@dataclasses.dataclass(frozen=True)
class _Fragment:
    """One of `count` fragments, which holds every `count`-th layer and every `count`-th other parameter."""

    index: int
    count: int

    def update(self, function: Callable[..., tuple[jax.Array, ...]], axes: Tree, *trees: Tree) -> tuple[Tree, ...]:
        """Apply `function(*leaves) -> leaves` to the parameters of the fragment; the others stay unchanged."""
        leaves = [jax.tree.leaves(tree) for tree in trees]
        names = jax.tree.leaves(axes, is_leaf=is_axes)
        structure, updated = jax.tree.structure(trees[0]), []
        for number, (axes_of_leaf, *values) in enumerate(zip(names, *leaves, strict=True)):
            if is_stacked(axes_of_leaf) and len(values[0]) >= self.count > 1:
                rows = slice(self.index, None, self.count)
                new = function(*(x[rows] for x in values))
                updated.append(tuple(x.at[rows].set(part) for x, part in zip(values, new, strict=True)))
            else:
                is_own = number % self.count == self.index
                updated.append(function(*values) if is_own else tuple(values))
        return tuple(jax.tree.unflatten(structure, column) for column in zip(*updated, strict=True))


def make_diloco_step(inner: StepFn, diloco: Diloco, *, steps: int, mesh: Any, axes: Tree) -> StepFn:
    """The step of all replicas, given that of one; `axes` are the logical axes of the trainable parameters."""

    def on_replica(state: TrainState, replica_1: jax.Array, batch: Batch) -> tuple[TrainState, Metrics]:
        diloco_state: DilocoState = state.opt_state
        own = jax.tree.map(lambda x: x[0], diloco_state.replicas)
        key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(state.key), replica_1[0]))
        start = TrainState(state.step, own.params, state.frozen, own.opt_state, key, own.guard, own.history)
        end, metrics = inner(start, batch)
        row_values = metrics.pop(ROW_VALUES, None)
        metrics = {name: _combine(name, value) for name, value in metrics.items()}
        if row_values is not None:
            gather = partial(jax.lax.all_gather, axis_name=REPLICA, axis=0, tiled=True)
            metrics[ROW_VALUES] = jax.tree.map(gather, row_values)
        step = state.step + jnp.where(metrics["halted"], 0, 1)
        params, momentum, own_params = _synchronize(
            diloco, steps, axes, step, (state.params, diloco_state.momentum, end.params)
        )
        replica = own._replace(params=own_params, opt_state=end.opt_state, guard=end.guard, history=end.history)
        replicas = jax.tree.map(lambda x: x[None], replica)
        return TrainState(
            step, params, state.frozen, DilocoState(replicas, momentum), state.key, state.guard, state.history
        ), metrics

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        whole, by_replica = PartitionSpec(), PartitionSpec(REPLICA)
        of_state = TrainState(whole, whole, whole, DilocoState(by_replica, whole), whole, whole, whole)  # type: ignore[arg-type]
        run = jax.shard_map(
            on_replica,
            mesh=mesh,
            in_specs=(of_state, by_replica, by_replica),
            out_specs=(of_state, whole),
            axis_names={REPLICA},
            check_vma=False,
        )
        return run(state, jnp.arange(mesh.shape[REPLICA]), batch)

    return step


def _combine(name: str, value: jax.Array) -> jax.Array:
    """One value of a metric for all replicas."""
    if name in TOTALS:
        return jax.lax.psum(value, REPLICA)
    if name in MAXIMA:
        return jax.lax.pmax(value.astype(jnp.int32), REPLICA).astype(value.dtype)
    return jax.lax.pmean(value, REPLICA)


def _synchronize(diloco: Diloco, steps: int, axes: Tree, step: jax.Array, trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Shared parameters, momentum and this replica's parameters, after the outer step of the fragment that is due."""
    assert diloco.period is not None

    def outer_step(shared: jax.Array, momentum: jax.Array, own: jax.Array) -> tuple[jax.Array, ...]:
        mean = jax.lax.pmean(own.astype(jnp.float32), REPLICA)
        gradient = shared.astype(jnp.float32) - mean
        momentum = diloco.momentum * momentum + gradient
        shared = (shared - diloco.learning_rate * (gradient + diloco.momentum * momentum)).astype(shared.dtype)
        return shared, momentum, shared

    def branch(fragment: _Fragment) -> Callable[[tuple[Tree, ...]], tuple[Tree, ...]]:
        return lambda trees: fragment.update(outer_step, axes, *trees)

    count = diloco.fragments
    branches = [lambda trees: trees, *(branch(_Fragment(index, count)) for index in range(count))]
    offsets = jnp.asarray([index * diloco.period // count for index in range(count)])
    due = jnp.any(step % diloco.period == offsets)
    number = jnp.where(due, 1 + jnp.argmax(step % diloco.period == offsets), 0)
    if count > 1:
        branches.append(branch(_Fragment(0, 1)))
    return jax.lax.switch(jnp.where(step == steps, len(branches) - 1, number), branches, trees)
