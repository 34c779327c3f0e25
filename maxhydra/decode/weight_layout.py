"""Weight layout: how the engine stores weights, for steps that multiply few rows by every weight.

XLA copies a layer's weights out of their stack before using them, so the stacks are split into layers once. On a CPU,
matmuls with few rows are fast only with the weight as the left operand and its output dimension first in memory:
weights are stored transposed, and the programs transpose them back, which the compiler folds into the matmul. Matmuls
of SmolLM2 (135M, float32, 2 cores) take a third less time at batch 1 and half at batch 8. On a GPU, one row also needs
the output dimension first, and few large matmuls are faster than many: weights with the same input are concatenated,
split by the programs and fused again by the layers, which the compiler removes; 4-bit weights of experts are packed for
the kernels of grouped_matmul/few_rows.py. Programs take longer to compile, since every layer is unrolled.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config.schema.model import Projection
from maxhydra.kernels.grouped_matmul.expert_weights import pack_int4, pack_mxfp4
from maxhydra.layers.quant import four_bit, mxfp4
from maxhydra.model import ModelDef
from maxhydra.sharding import LogicalAxes, Sharder, is_axes

Tree = Any
# Projections of a sub-layer that share their input.
JOINED = {"attention": ("query", "key", "value"), "mlp": ("gate", "up")}
LAYERS = ("prefix", "pattern", "remainder")


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """The model that programs run, and the conversion of weights to and from the stored layout."""

    model: ModelDef
    keep: Callable[[Tree], Tree]
    """Convert weights from the standard layout to the stored one."""
    use: Callable[[Tree], Tree]
    """Convert stored weights to those that `model` takes; called inside a program."""
    unstack: Callable[[Tree], Tree]
    """Rearrange a tree of arrays per layer as `model` has its layers; the arrays themselves stay as they are."""


def choose_weight_layout(model: ModelDef, sharder: Sharder, platform: str) -> WeightLayout:
    """Return the layout for the devices: on one CPU or GPU as described above, otherwise the standard one."""
    if sharder.mesh.size > 1 or platform not in ("cpu", "gpu"):
        return WeightLayout(model, keep=lambda tree: tree, use=lambda tree: tree, unstack=lambda tree: tree)
    layout = Projection.outputs_first if platform == "cpu" else Projection.joined
    flat = flattened(model, layout)
    arranged = _Flat(model, flat, joins=layout is Projection.joined)
    return WeightLayout(flat, keep=arranged.keep, use=arranged.use, unstack=arranged.unstack)


def flattened(model: ModelDef, layout: Projection) -> ModelDef:
    """Return the same model with every layer unrolled."""
    config = model.config
    repeated = config.num_layers - len(config.prefix)
    pattern = [config.pattern[index % len(config.pattern)] for index in range(repeated)]
    kernels = dataclasses.replace(config.kernels, projection=layout)
    flat = dataclasses.replace(config, prefix=[*config.prefix, *pattern], kernels=kernels)
    return dataclasses.replace(model, config=flat)


def unstacked(model: ModelDef, params: Tree) -> Iterator[tuple[str, Tree, int | None]]:
    """Yield every layer, first to last: the number of the first layer of its kind, its weights or the stack that
    contains them, and its position in the stack."""
    config = model.config
    places = _in_order(params.get("pattern", {}))
    repetitions = (config.num_layers - len(config.prefix)) // len(config.pattern) if places else 0
    number = 0
    for layer in _in_order(params.get("prefix", {})):
        yield str(number), layer, None
        number += 1
    for repetition in range(repetitions):
        for index, place in enumerate(places):
            yield str(number + index), place, repetition
    number += repetitions * len(places)
    for index, layer in enumerate(_in_order(params.get("remainder", {}))):
        yield str(number + index), layer, None


@dataclasses.dataclass(frozen=True)
class _Flat:
    """Unstacked layers with the output dimension first, optionally with fused projections."""

    model: ModelDef
    flat: ModelDef
    joins: bool

    def keep(self, params: Tree) -> Tree:
        """Convert layer by layer, so that peak memory is two copies of all weights plus one layer.

        One program converts all layers of a stack; operation by operation, each weight would need several.
        """
        packed_params = {name: self._stored_part(name, part) for name, part in params.items() if name not in LAYERS}
        layers = enumerate(unstacked(self.model, params))
        packed_params["prefix"] = {str(n): self._convert_layer(*layer) for n, layer in layers}
        return packed_params

    def _stored_part(self, name: str, part: Tree) -> Tree:
        """Convert weights outside the stacks: embedding, head, final norm and the MTP layers."""
        axes = self.flat.axes[name]
        turned = _map(_turned, axes, part)
        return _with_packed_experts(turned, axes) if self.joins else turned

    @functools.cached_property
    def _convert_layer(self) -> Callable[[str, Tree, int | None], Tree]:
        return jax.jit(self._stored_layer, static_argnums=0)

    def use(self, packed_params: Tree) -> Tree:
        axes = self.flat.axes
        params = {
            name: _map(_turned_back, axes[name], part) for name, part in packed_params.items() if name != "prefix"
        }
        params["prefix"] = {
            number: self._used_layer(number, layer) for number, layer in packed_params["prefix"].items()
        }
        return params

    def unstack(self, tree: Tree) -> Tree:
        layers = {
            str(number): layer if position is None else jax.tree.map(lambda stack, at=position: stack[at], layer)
            for number, (_, layer, position) in enumerate(unstacked(self.model, tree))
        }
        return {**{name: part for name, part in tree.items() if name not in LAYERS}, "prefix": layers}

    def _stored_layer(self, number: str, layer: Tree, position: jax.Array | None) -> Tree:
        axes = self.flat.axes["prefix"][number]
        if position is not None:
            layer = jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, position, keepdims=False), layer)
        turned = _map(_turned, axes, layer)
        if not self.joins:
            return turned
        return _with_packed_experts(_joined(turned, self.flat.shapes["prefix"][number], axes), axes)

    def _used_layer(self, number: str, layer: Tree) -> Tree:
        """Transpose fused weights back before splitting them, so that the layers fuse contiguous arrays again."""
        axes = self.flat.axes["prefix"][number]
        return _parted(_map(_turned_back, axes, layer), self.flat.shapes["prefix"][number], axes)


def _with_packed_experts(layer: Tree, axes: Tree) -> Tree:
    """Pack INT4 and MXFP4 weights of experts for the kernels of a few rows."""
    if not isinstance(layer, dict):
        return layer
    if "nibbles" in layer and axes["nibbles"][0] == "experts":
        return four_bit.packed(layer, pack_mxfp4 if layer["scales"].dtype == mxfp4.SCALE else pack_int4)
    return {name: _with_packed_experts(below, axes[name]) for name, below in layer.items()}


def _joined(layer: Tree, shapes: Tree, axes: Tree) -> Tree:
    """Concatenate kernels that share an input under the first one's key; the other keys hold None."""
    layer = jax.tree.map(lambda leaf: leaf, layer)
    for part, names in _joins(shapes, axes):
        whole = jax.tree.map(lambda *each: jnp.concatenate(each), *[layer[part][name]["kernel"] for name in names])
        for name in names:
            layer[part][name]["kernel"] = whole if name == names[0] else jax.tree.map(lambda _: None, whole)
    return layer


def _parted(layer: Tree, shapes: Tree, axes: Tree) -> Tree:
    """Split fused kernels, given with the input dimension first."""
    for part, names in _joins(shapes, axes):
        if jax.tree.leaves(layer[part][names[-1]]["kernel"]):
            continue
        whole = layer[part][names[0]]["kernel"]
        for index, name in enumerate(names):
            own = [shapes[part][other]["kernel"] for other in (name, *names[:index])]
            layer[part][name]["kernel"] = jax.tree.map(_cut, axes[part][name]["kernel"], whole, *own, is_leaf=is_axes)
    return layer


def _joins(shapes: Tree, axes: Tree) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield sub-layers whose projections can be fused: all exist in one dtype, and only their first output dimension
    differs."""
    for part, names in JOINED.items():
        if all("kernel" in shapes.get(part, {}).get(name, {}) for name in names):
            kernels = [(axes[part][name]["kernel"], shapes[part][name]["kernel"]) for name in names]
            other_axes = [jax.tree.map(_other_axes, *kernel, is_leaf=is_axes) for kernel in kernels]
            if all(axes == other_axes[0] for axes in other_axes):
                yield part, names


def _other_axes(names: LogicalAxes, own: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Return the dimensions in which arrays must agree to be concatenated."""
    axis = int(names[0] == "embed")
    return (*own.shape[:axis], *own.shape[axis + 1 :])


def _cut(names: LogicalAxes, whole: jax.Array, own: jax.ShapeDtypeStruct, *before: jax.ShapeDtypeStruct) -> jax.Array:
    """Slice one kernel out of a fused array, after the kernels in `before`."""
    axis = int(names[0] == "embed")
    start = sum(other.shape[axis] for other in before)
    return jax.lax.slice_in_dim(whole, start, start + own.shape[axis], axis=axis)


def _in_order(blocks: dict[str, Tree]) -> list[Tree]:
    return [blocks[str(index)] for index in range(len(blocks))]


def _map(function: Callable[..., Any], axes: Tree, weights: Tree) -> Tree:
    """Apply function(path, logical axes, weight) to every weight that is not None."""

    def of(keys: jax.tree_util.KeyPath, names: LogicalAxes, weight: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return None if weight is None else function(path, names, weight)

    return jax.tree_util.tree_map_with_path(of, axes, weights, is_leaf=is_axes)


def _turned(path: str, names: LogicalAxes, weight: jax.Array) -> jax.Array:
    """Move the output dimension of a weight to the front."""
    source, target = _move(names)
    return jnp.moveaxis(weight, source, target)


def _turned_back(path: str, names: LogicalAxes, weight: jax.Array) -> jax.Array:
    source, target = _move(names)
    return jnp.moveaxis(weight, target, source)


def _move(names: LogicalAxes) -> tuple[int, int]:
    """Return the source and target of the moved axis: the embed axis moves last as an input, first as an output.

    The embedding already has its output, the vocabulary, first; positions are looked up; expert matmuls need the
    standard layout.
    """
    if names and names[0] == "experts":
        return 0, 0
    if len(names) > 1 and names[0] == "embed":
        return 0, -1
    if len(names) > 1 and names[-1] == "embed" and names[0] not in ("vocab", "positions"):
        return -1, 0
    return 0, 0
