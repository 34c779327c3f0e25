"""A model under its adapter or in fewer bits: how the base is kept there, and adapter and base as the latter alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.layers import LoraSpec
from maxhydra.layers.quant import int4, int8, nf4
from maxhydra.model.flops import parameter_count
from maxhydra.model.model_def import ModelDef
from maxhydra.model.param_partition import ADAPTER, split_trainable

Tree = Any
TO_NF4 = jax.jit(nf4.stored, static_argnames=("inputs", "stacked"))
TO_INT4 = jax.jit(int4.stored, static_argnames=("inputs", "leading", "groups"))
TO_INT8 = jax.jit(int8.stored, static_argnames=("axes", "of_scales"))


def kept(model: ModelDef, keys: tuple[str, ...], weight: jax.Array) -> Tree:
    """A weight of the model's base, found below these keys, as the model keeps it."""
    return part_kept(model, keys, weight, counted=0)


def part_kept(model: ModelDef, keys: tuple[str, ...], weight: jax.Array, *, counted: int) -> Tree:
    """The same of a part of the weight, at an index of so many of its leading axes."""
    place, axes = model.shapes, model.axes
    for key in keys:
        place, axes = place[key], axes[key]
    if not isinstance(place, dict):
        return weight
    stacked = int(_is_stacked(keys))
    if "groups" in place:
        return TO_NF4(weight, inputs=weight.ndim - place["codes"].ndim + 1, stacked=bool(stacked))
    if "nibbles" in place:
        leading = stacked + (axes["nibbles"][stacked] == "experts")
        inputs = weight.ndim + counted - place["nibbles"].ndim + 1
        return TO_INT4(weight, inputs=inputs, leading=leading - counted, groups=place["scales"].shape[leading])
    return TO_INT8(weight, axes=axes["codes"][counted:], of_scales=axes["scales"][counted:])


def parameter_counts(model: ModelDef) -> tuple[int, int]:
    """Weights of the model with its adapter, and how many of them are trained."""
    own, (trained, frozen) = parameter_count(model.base.shapes), split_trainable(model.shapes)
    return (own + parameter_count(trained), parameter_count(trained)) if frozen else (own, own)


def merged(model: ModelDef, weights: Tree, *, dtype: np.dtype) -> Tree:
    """The weights of the base with what the adapter adds: the same answers without an adapter."""
    spec = LoraSpec.of(model.adapter)
    if spec is None:
        return weights

    def walk(node: Tree, shapes: Tree, keys: tuple[str, ...]) -> Tree:
        if not isinstance(node, dict):
            return node.astype(dtype)
        if ADAPTER not in node and not isinstance(node.get("kernel"), dict):
            return {name: walk(below, shapes[name], (*keys, name)) for name, below in node.items()}
        kernel, stacked = node["kernel"], _is_stacked(keys)
        if isinstance(kernel, dict):
            kernel = nf4.restored(kernel, shapes["kernel"].shape, stacked=stacked, dtype=np.dtype(np.float32))
        if ADAPTER in node:
            kernel = kernel.astype(jnp.float32) + spec.scale * _product(**node[ADAPTER], stacked=stacked)
        beside = {name: walk(node[name], shapes[name], (*keys, name)) for name in shapes if name != "kernel"}
        return {"kernel": kernel.astype(dtype), **beside}

    return walk(weights, model.base.shapes, ())


def _product(a: jax.Array, b: jax.Array, *, stacked: bool) -> jax.Array:
    """a [*inputs, rank] times b [rank, *outputs], in full precision where the hardware would round."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)

    return jax.vmap(one)(a, b) if stacked else one(a, b)


def _is_stacked(keys: tuple[str, ...]) -> bool:
    return keys[0] == "pattern"
