"""Learned initialization of a student whose attention heads differ from those of its teacher.

A projection of the student is a linear map of the teacher's. It maps heads and head dimensions by one matrix each
(bilinear), or all of them together (linear); the width of the residual stream is the same. The maps are trained with
the distillation loss before the first step, while all other weights are those of the teacher. The result is the initial
weights of an ordinary run, which has no maps.

D residual stream, x and y heads and head size of the teacher, u and v those of the student. Layers of one pattern
position are stacked on a leading axis.
"""

import logging
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxhydra.config.schema.tasks.distill import LearnToInit, WeightMap
from maxhydra.distill.loss import TEACHER
from maxhydra.distill.teacher import arrange_layers, require_same_shapes
from maxhydra.model import ModelDef
from maxhydra.runtime import signals
from maxhydra.sharding import Sharder
from maxhydra.train.loss import Batch, LossFn, Tree

log = logging.getLogger("maxhydra")
Path = tuple[str, ...]
# Projections of attention, and the axis names of their weights.
AXES = {"query": "dxy", "key": "dxy", "value": "dxy", "gate": "dxy", "out": "xyd"}
# Standard deviation of the part of a map that connects sizes which the teacher does not have. At zero, queries and keys
# of these dimensions would have no gradient.
NOISE = 0.02


def initial_maps(shapes: Tree, kind: WeightMap, *, target: Tree, key: jax.Array) -> dict[Path, dict[str, jax.Array]]:
    """Maps of the teacher's projections with these shapes to the target shapes, by path of the projection.

    Equal sizes give the identity. Otherwise several heads become their mean, or a head is repeated.
    """
    maps: dict[Path, dict[str, jax.Array]] = {}
    expected = nnx.traversals.flatten_mapping(target)
    for path, leaf in nnx.traversals.flatten_mapping(shapes).items():
        if path[-1] != "kernel" or path[-3:-2] != ("attention",) or path[-2] not in AXES:
            continue
        at = slice(-2, None) if AXES[path[-2]] == "dxy" else slice(-3, -1)
        (x, y), (u, v), stack = leaf.shape[at], expected[path].shape[at], leaf.shape[:-3]
        key, noise_key = jax.random.split(key)
        heads, dims = jnp.asarray(_head_map(x, u)), jnp.eye(y, v)
        if y != v:
            dims = dims + NOISE * jax.random.normal(noise_key, (y, v))
        if kind is WeightMap.bilinear:
            found = {"heads": heads, "dims": dims}
        else:
            found = {"map": jnp.einsum("xu,yv->xyuv", heads, dims)}
        maps[path[:-1]] = {name: jnp.broadcast_to(matrix, (*stack, *matrix.shape)) for name, matrix in found.items()}
    return maps


def apply_maps(maps: dict[Path, dict[str, jax.Array]], weights: Tree) -> Tree:
    """The weights with all projections that have a map replaced by those of the student."""
    leaves = dict(nnx.traversals.flatten_mapping(weights))
    for path, arrays in maps.items():
        axes = AXES[path[-1]]
        leaves[*path, "kernel"] = _map_weight(leaves[*path, "kernel"], axes, arrays)
        # The bias of a query, key or value belongs to the heads, that of the output to the residual stream.
        if axes == "dxy" and (*path, "bias") in leaves:
            leaves[*path, "bias"] = _map_weight(leaves[*path, "bias"], "xy", arrays)
    return nnx.traversals.unflatten_mapping(leaves)


def learn_init(
    student: ModelDef,
    teacher: ModelDef,
    weights: Tree,
    layers: list[int],
    settings: LearnToInit,
    *,
    loss: LossFn,
    batches: Iterable[Batch],
    sharder: Sharder,
) -> Tree:
    """Initial weights of the student: the teacher's `layers`, with maps trained on one batch per step.

    `loss` takes the student's weights with the teacher's under TEACHER, and a batch.
    """
    build = arrange_layers(student, teacher, layers)
    shapes = jax.eval_shape(build, teacher.shapes)
    maps = initial_maps(shapes, settings.map, target=student.shapes, key=jax.random.key(0))
    require_same_shapes(
        student.shapes, jax.eval_shape(apply_maps, maps, shapes), differs_in="layers or attention heads"
    )
    arranged = jax.jit(build)(weights)
    optimizer = optax.adam(settings.learning_rate)

    @jax.jit
    def step(maps: Any, state: Any, arranged: Tree, weights: Tree, batch: Batch) -> tuple[Any, Any, jax.Array]:
        def objective(maps: Any) -> jax.Array:
            sums = loss({**apply_maps(maps, arranged), TEACHER: weights}, batch, None)
            return sums["loss"] / jnp.maximum(sums["weight"], 1)

        value, gradients = jax.value_and_grad(objective)(maps)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(maps, updates), state, value

    state, losses = optimizer.init(maps), []
    for batch in batches:
        signals.check()
        maps, state, value = step(maps, state, arranged, weights, batch)
        losses.append(value)
    log.info("learned the initial weights in %d steps: loss %.4f, then %.4f", len(losses), losses[0], losses[-1])
    return jax.device_put(jax.jit(apply_maps)(maps, arranged), sharder.tree(student.axes))


def _map_weight(weight: jax.Array, axes: str, arrays: dict[str, jax.Array]) -> jax.Array:
    result = axes.replace("xy", "uv")
    if "map" in arrays:
        return jnp.einsum(f"...{axes},...xyuv->...{result}", weight, arrays["map"])
    return jnp.einsum(f"...{axes},...xu,...yv->...{result}", weight, arrays["heads"], arrays["dims"])


def _head_map(x: int, u: int) -> np.ndarray:
    """[x, u] means over neighbouring heads, or copies of them."""
    owner = np.arange(max(x, u)) * min(x, u) // max(x, u)
    matrix = np.zeros((x, u), np.float32)
    if x >= u:
        matrix[np.arange(x), owner] = 1
        return matrix / matrix.sum(axis=0)
    matrix[owner, np.arange(u)] = 1
    return matrix
