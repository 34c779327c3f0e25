"""Muon (Jordan et al., 2024): orthogonalized momentum for the matrices of the layers, and its variant NorMuon.

Embeddings, head, norms and biases are left to another transformation.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from maxhydra.config.schema.optimizer import Optimizer as OptimizerConfig
from maxhydra.optim.parameters import MatrixDims, layer_matrices, partition_matrices, path_of
from maxhydra.sharding import LogicalAxes

Tree = Any
Axes = dict[str, LogicalAxes]

# Typical RMS of AdamW updates. Muon updates are scaled to it, so that Muon's matrices and AdamW's vectors share one
# learning rate and weight decay (Liu et al., 2025, "Muon is scalable for LLM training").
ADAM_RMS = 0.2


def orthogonal_momentum(
    config: OptimizerConfig, axes: Axes, rest: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Orthogonalized momentum for the layers' matrices; `rest` for embeddings, head, norms and biases.

    `optax.contrib.muon` composes the same transformations, but cannot mask the weight decay of its AdamW half.
    """
    matrices = layer_matrices(axes)
    dimensions = {path: MuonDimensionNumbers(m.rows, m.columns) for path, m in matrices.items()}

    def dimensions_of(updates: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda keys, _: dimensions[path_of(keys)], updates)

    orthogonal = scale_by_muon(
        ns_steps=config.newton_schulz_steps,
        beta=config.momentum,
        eps=config.eps,
        mu_dtype=config.mu_dtype.value if config.mu_dtype else None,
        weight_dimension_numbers=dimensions_of,
    )
    rms = ADAM_RMS if config.update_rms is None else config.update_rms
    if config.neuron_b2 is None:
        scaled = optax.chain(orthogonal, _scale_orthogonal(matrices, rms))
    else:
        assert config.eps is not None
        scaled = optax.chain(orthogonal, _normalize_neurons(matrices, config.neuron_b2, config.eps, rms))
    return partition_matrices("muon", scaled, rest, matrices)


def _scale_orthogonal(matrices: dict[str, MatrixDims], rms: float) -> optax.GradientTransformation:
    """Scale orthogonal n x m matrices, whose RMS is 1 / sqrt(max(n, m)), to an RMS.

    An RMS of 0 stands for Jordan's own scale, sqrt(max(1, outputs / inputs)).
    """

    def scale(keys: jax.tree_util.KeyPath, update: jax.Array) -> jax.Array:
        matrix = matrices[path_of(keys)]
        inputs, outputs = (math.prod(update.shape[d] for d in dims) for dims in (matrix.rows, matrix.columns))
        factor = rms * math.sqrt(max(inputs, outputs)) if rms else math.sqrt(max(1.0, outputs / inputs))
        return update * factor

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


class NeuronState(NamedTuple):
    """Second moment of the update of each output of a matrix; the dimensions of its inputs have size 1."""

    second: Tree


def _normalize_neurons(
    matrices: dict[str, MatrixDims], b2: float, eps: float, rms: float
) -> optax.GradientTransformation:
    """NorMuon (Li et al., 2025): divide the update of each neuron by its RMS over the steps, then scale the matrix.

    Orthogonalization leaves rows of unequal norm in a tall matrix, and a few neurons would take most of the update.
    """

    def init(params: Tree) -> NeuronState:
        def zeros(keys: jax.tree_util.KeyPath, param: jax.Array) -> jax.Array:
            rows = matrices[path_of(keys)].rows
            shape = (1 if dimension in rows else size for dimension, size in enumerate(param.shape))
            return jnp.zeros(tuple(shape), jnp.float32)

        return NeuronState(jax.tree_util.tree_map_with_path(zeros, params))

    def update(updates: Tree, state: NeuronState, params: Tree = None) -> tuple[Tree, NeuronState]:
        def blend(keys: jax.tree_util.KeyPath, x: jax.Array, old: jax.Array) -> jax.Array:
            rows = matrices[path_of(keys)].rows
            return b2 * old + (1 - b2) * jnp.mean(jnp.square(x), axis=rows, keepdims=True)

        def normalize(keys: jax.tree_util.KeyPath, x: jax.Array, neurons: jax.Array) -> jax.Array:
            matrix = matrices[path_of(keys)]
            normalized = x / (jnp.sqrt(neurons) + eps)
            dims = (*matrix.rows, *matrix.columns)
            return rms * normalized * jax.lax.rsqrt(jnp.mean(jnp.square(normalized), axis=dims, keepdims=True))

        second = jax.tree_util.tree_map_with_path(blend, updates, state.second)
        return jax.tree_util.tree_map_with_path(normalize, updates, second), NeuronState(second)

    return optax.GradientTransformation(init, update)
