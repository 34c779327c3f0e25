"""Partition into trainable and frozen weights, base weights in their storage format, and merging of LoRA adapters.

With an adapter only its weights and a value or score head are trained; without one all are. Trees are nested dicts with
any leaves: arrays, shapes, axes, shardings. Storage formats are plain, NF4, INT8, INT4 and MXFP4.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.layers import LoraSpec
from maxhydra.layers.linear import column_norms
from maxhydra.layers.quant import int4, int8, mxfp4, nf4
from maxhydra.model.model_def import VALUE, ModelDef, parameter_count

# Key of a projection's LoRA weights.
ADAPTER = "lora"
# Paths of arrays of an adapter that are not trained, and of those that are not decayed, as regular expressions.
CONSTANT = (f"/{ADAPTER}/start_[ab]$",)
UNDECAYED = (f"/{ADAPTER}/magnitude$",)
# Key of a projection's amax history (layers/quant/training.py).
HISTORY = "history"
# Key of the head of a reward model, which is trained with an adapter too: it is not in the base weights.
SCORE = "score"


Tree = Any


def split_trainable(tree: Tree) -> tuple[Tree, Tree]:
    """(trainable weights, frozen weights), without amax histories; nothing is frozen without an adapter."""
    weights = _part(tree, HISTORY, within=False) if _has(tree, HISTORY) else tree
    if not _has(weights, ADAPTER):
        return weights, {}
    trainable, frozen = (_part(weights, ADAPTER, within=within) for within in (True, False))
    heads = {name: frozen.pop(name) for name in (VALUE, SCORE) if name in frozen}
    return {**trainable, **heads}, frozen


def amax_histories(tree: Tree) -> Tree:
    """Only the amax histories; `merge_trees` of these and both parts of `split_trainable` gives the tree."""
    return _part(tree, HISTORY, within=True)


def merge_trees(first: Tree, second: Tree) -> Tree:
    """The union of two trees; a leaf of both is that of the first."""
    common = {
        key: merge_trees(first[key], second[key]) for key in first if key in second and isinstance(first[key], dict)
    }
    return {**second, **first, **common}


def map_leaves(tree: Tree, function: Callable[[tuple[str, ...], Any], Tree], keys: tuple[str, ...] = ()) -> Tree:
    """Replace each leaf by a function of its keys and value.

    The old tree is emptied in the process, so old and new leaves need not all exist at once.
    """
    if not isinstance(tree, dict):
        return function(keys, tree)
    return {name: map_leaves(tree.pop(name), function, (*keys, name)) for name in list(tree)}


def _has(tree: Tree, key: str) -> bool:
    return isinstance(tree, dict) and any(name == key or _has(below, key) for name, below in tree.items())


def _part(tree: Tree, key: str, *, within: bool) -> Tree:
    """The leaves below a key, or all others, without empty branches."""
    if not isinstance(tree, dict):
        return {} if within else tree
    part = {}
    for name, below in tree.items():
        if name == key:
            subtree = below if within else {}
        else:
            subtree = _part(below, key, within=within)
        if not isinstance(subtree, dict) or subtree:
            part[name] = subtree
    return part


TO_NF4 = jax.jit(nf4.stored, static_argnames=("inputs", "stacked"))
TO_INT4 = jax.jit(int4.stored, static_argnames=("inputs", "leading", "groups"))
TO_MXFP4 = jax.jit(mxfp4.stored, static_argnames=("inputs", "leading"))
TO_INT8 = jax.jit(int8.stored, static_argnames=("axes", "of_scales"))


def store_weight(model: ModelDef, keys: tuple[str, ...], weight: jax.Array) -> Tree:
    """A base weight at this path, converted to the model's storage format."""
    return store_weight_slice(model, keys, weight, counted=0)


def store_weight_slice(model: ModelDef, keys: tuple[str, ...], weight: jax.Array, *, counted: int) -> Tree:
    """`store_weight` for a slice of the weight, at an index of its first `counted` axes."""
    shapes, axes = model.shapes, model.axes
    for key in keys:
        shapes, axes = shapes[key], axes[key]
    if not isinstance(shapes, dict):
        return weight
    stacked = int(_is_stacked(keys))
    if "groups" in shapes:
        return TO_NF4(weight, inputs=weight.ndim - shapes["codes"].ndim + 1, stacked=bool(stacked))
    if "nibbles" in shapes:
        leading = stacked + (axes["nibbles"][stacked] == "experts")
        inputs = weight.ndim + counted - shapes["nibbles"].ndim + 1
        if shapes["scales"].dtype == mxfp4.SCALE:
            return TO_MXFP4(weight, inputs=inputs, leading=leading - counted)
        return TO_INT4(weight, inputs=inputs, leading=leading - counted, groups=shapes["scales"].shape[leading])
    return TO_INT8(weight, axes=axes["codes"][counted:], of_scales=axes["scales"][counted:])


def parameter_counts(model: ModelDef) -> tuple[int, int]:
    """Number of weights of the model with its adapter, and of those that are trained."""
    base, (trained, frozen) = model.base.shapes, split_trainable(model.shapes)
    if not frozen:
        return parameter_count(base), parameter_count(base)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    constant = parameter_count([leaf for path, leaf in leaves if path[-1].key.startswith("start_")])
    return parameter_count(merge_trees(base, trained)) - constant, parameter_count(trained) - constant


def merge_adapter(model: ModelDef, weights: Tree, *, dtype: np.dtype) -> Tree:
    """Base weights with the LoRA update merged in: the same outputs without an adapter."""
    spec = LoraSpec.of(model.adapter)
    if spec is None:
        return weights

    def walk(node: Tree, shapes: Tree, keys: tuple[str, ...]) -> Tree:
        if not isinstance(node, dict):
            return node.astype(dtype)
        if ADAPTER not in node and not isinstance(node.get("kernel"), dict):
            return {name: walk(below, shapes[name], (*keys, name)) for name, below in node.items()}
        weight = _weight_name(node)
        kernel = node[weight]
        if isinstance(kernel, dict):
            like = shapes[weight].shape
            kernel = nf4.dequantized(kernel, like, stacked=_is_stacked(keys), dtype=np.dtype(np.float32))
        if ADAPTER in node:
            leading = _leading_axes(model, keys)
            kernel = _merged(kernel.astype(jnp.float32), node[ADAPTER], spec.scale, leading=leading)
        others = {name: walk(node[name], shapes[name], (*keys, name)) for name in shapes if name != weight}
        return {weight: kernel.astype(dtype), **others}

    return walk(weights, model.base.shapes, ())


def fit_adapter(model: ModelDef, weights: Tree) -> Tree:
    """Weights whose fresh adapter has the values that derive from the base weights: column norms, singular vectors."""
    spec = LoraSpec.of(model.adapter)
    if spec is None or not (spec.has_magnitude or spec.has_start):
        return weights

    def walk(node: Tree, shapes: Tree, keys: tuple[str, ...]) -> Tree:
        if not isinstance(node, dict) or ADAPTER not in node:
            is_leaf = not isinstance(node, dict) or isinstance(shapes, jax.ShapeDtypeStruct)
            return node if is_leaf else {name: walk(node[name], shapes[name], (*keys, name)) for name in node}
        weight, leading = _weight_name(node), _leading_axes(model, keys)
        kernel = node[weight]
        if isinstance(kernel, dict):
            like = shapes[weight].shape
            kernel = nf4.dequantized(kernel, like, stacked=_is_stacked(keys), dtype=np.dtype(np.float32))
        fit: Callable[[jax.Array], Tree] = partial(_fitted, spec=spec, inputs=node[ADAPTER]["a"].ndim - 1 - leading)
        for _ in range(leading):
            fit = partial(jax.lax.map, fit)
        fitted = fit(kernel.astype(jnp.float32))
        return {**node, ADAPTER: {**node[ADAPTER], **fitted}}

    return walk(weights, model.base.shapes, ())


def _fitted(kernel: jax.Array, spec: LoraSpec, *, inputs: int) -> dict[str, jax.Array]:
    """Arrays of an adapter that start with values of its kernel [*inputs, *outputs]."""
    fitted = {"magnitude": column_norms(kernel, inputs=inputs)} if spec.has_magnitude else {}
    if not spec.has_start:
        return fitted
    rows, columns = kernel.shape[:inputs], kernel.shape[inputs:]
    u, values, v = jnp.linalg.svd(kernel.reshape(math.prod(rows), -1), full_matrices=False)
    rank = min(spec.rank, len(values))
    roots, rest = jnp.sqrt(values[:rank] / spec.scale), spec.rank - rank
    a = jnp.pad(u[:, :rank] * roots, ((0, 0), (0, rest))).reshape(*rows, spec.rank)
    b = jnp.pad(roots[:, None] * v[:rank], ((0, rest), (0, 0))).reshape(spec.rank, *columns)
    return {**fitted, "a": a, "b": b, "start_a": a, "start_b": b}


def _merged(kernel: jax.Array, adapter: Tree, scale: float, *, leading: int) -> jax.Array:
    """A kernel with its adapter, in float32; `leading`: axes of layers and experts."""
    update = _low_rank_update(adapter["a"], adapter["b"], leading=leading)
    if "start_a" in adapter:
        update -= _low_rank_update(adapter["start_a"], adapter["start_b"], leading=leading)
    merged = kernel + scale * update
    if "magnitude" not in adapter:
        return merged
    norms = partial(column_norms, inputs=adapter["a"].ndim - 1 - leading)
    ratio = adapter["magnitude"] / _over(norms, leading)(merged)
    inputs = range(leading, adapter["a"].ndim - 1)
    return merged * jnp.expand_dims(ratio, tuple(inputs))


def _low_rank_update(a: jax.Array, b: jax.Array, *, leading: int) -> jax.Array:
    """a [*inputs, rank] @ b [rank, *outputs], in full float32 precision on any hardware."""

    def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)

    return _over(matmul, leading)(a, b)


def _over(function: Callable[..., jax.Array], leading: int) -> Callable[..., jax.Array]:
    """The function over this many leading axes."""
    for _ in range(leading):
        function = jax.vmap(function)
    return function


def _weight_name(node: Tree) -> str:
    """Key of the weight that an adapter updates."""
    return "table" if "table" in node else "kernel"


def _leading_axes(model: ModelDef, keys: tuple[str, ...]) -> int:
    """Number of axes of layers and experts of the adapter at this path."""
    node = model.axes
    for key in keys:
        node = node[key]
    return sum(name in ("layers", "experts") for name in node[ADAPTER]["a"])


def _is_stacked(keys: tuple[str, ...]) -> bool:
    return keys[0] == "pattern" or keys[:2] in (("vision", "layers"), ("audio", "layers"))
