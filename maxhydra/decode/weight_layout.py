"""Weights laid out for decoding, where a step is a few rows against every weight.

XLA copies a layer's weights out of their stack before using them, so layers are taken out of their stacks, once. On a
CPU it is fast for few rows only with the weight as the left operand, outputs first in memory: weights are turned round,
and the programs turn them back, which the compiler folds into the product. Products of SmolLM2 (135M, float32, 2
cores): a third less time at batch 1, half at batch 8. On a GPU one row wants its outputs first too, and few large
products are faster than many: weights with the same input lie together, are cut apart by the programs and put together
again by the layers, which the compiler folds into nothing. Programs take longer to compile, as every layer is written
out.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config.schema.model import Projection
from maxhydra.model import ModelDef
from maxhydra.sharding import LogicalAxes, Sharder, is_axes

Tree = Any
# Projections of a part of a layer that share their input.
JOINED = {"attention": ("query", "key", "value"), "mlp": ("gate", "up")}
LAYERS = ("prefix", "pattern", "remainder")


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """A model for the programs, and how its weights are kept."""

    model: ModelDef
    keep: Callable[[Tree], Tree]
    """Weights as the model at large has them -> as the engine keeps them."""
    use: Callable[[Tree], Tree]
    """As they are kept -> as `model` takes them; inside a program."""


def choose_weight_layout(model: ModelDef, sharder: Sharder, platform: str) -> WeightLayout:
    """The layout that suits the devices: on one CPU or GPU as described above, elsewhere as it is."""
    if sharder.mesh.size > 1 or platform not in ("cpu", "gpu"):
        return WeightLayout(model, keep=lambda params: params, use=lambda params: params)
    layout = Projection.outputs_first if platform == "cpu" else Projection.joined
    flat = flattened(model, layout)
    arranged = _Flat(model, flat, joins=layout is Projection.joined)
    return WeightLayout(flat, keep=arranged.keep, use=arranged.use)


def flattened(model: ModelDef, layout: Projection) -> ModelDef:
    """The same model with every layer written out."""
    config = model.config
    repeated = config.num_layers - len(config.prefix)
    pattern = [config.pattern[index % len(config.pattern)] for index in range(repeated)]
    kernels = dataclasses.replace(config.kernels, projection=layout)
    flat = dataclasses.replace(config, prefix=[*config.prefix, *pattern], kernels=kernels)
    return dataclasses.replace(model, config=flat)


def unstacked(model: ModelDef, params: Tree) -> Iterator[Tree]:
    """The weights of every layer, first to last; each is made when it is asked for."""
    config = model.config
    places = _in_order(params.get("pattern", {}))
    repetitions = (config.num_layers - len(config.prefix)) // len(config.pattern) if places else 0
    yield from _in_order(params.get("prefix", {}))
    for repetition in range(repetitions):
        for place in places:
            yield jax.tree.map(lambda stack, at=repetition: stack[at], place)
    yield from _in_order(params.get("remainder", {}))


@dataclasses.dataclass(frozen=True)
class _Flat:
    """Layers out of their stacks, outputs first, and perhaps joined."""

    model: ModelDef
    flat: ModelDef
    joins: bool

    def keep(self, params: Tree) -> Tree:
        """Layer by layer, so that beside the two copies of all weights there is room for one layer more at most."""
        axes = self.flat.axes
        kept = {name: _map(_turned, axes[name], part) for name, part in params.items() if name not in LAYERS}
        layers = enumerate(unstacked(self.model, params))
        kept["prefix"] = {str(n): self._kept_layer(str(n), layer) for n, layer in layers}
        return kept

    def use(self, kept: Tree) -> Tree:
        axes = self.flat.axes
        params = {name: _map(_turned_back, axes[name], part) for name, part in kept.items() if name != "prefix"}
        params["prefix"] = {number: self._used_layer(number, layer) for number, layer in kept["prefix"].items()}
        return params

    def _kept_layer(self, number: str, layer: Tree) -> Tree:
        axes = self.flat.axes["prefix"][number]
        turned = _map(_turned, axes, layer)
        return _joined(turned, self.flat.shapes["prefix"][number], axes) if self.joins else turned

    def _used_layer(self, number: str, layer: Tree) -> Tree:
        """Joined weights are turned back before they are cut: what the layers put together again is then whole."""
        axes = self.flat.axes["prefix"][number]
        return _parted(_map(_turned_back, axes, layer), self.flat.shapes["prefix"][number], axes)


def _joined(layer: Tree, shapes: Tree, axes: Tree) -> Tree:
    """Kernels that share an input as one under the first's key; the others' keys hold None."""
    layer = jax.tree.map(lambda leaf: leaf, layer)
    for part, names in _joins(shapes, axes):
        whole = jax.tree.map(lambda *each: jnp.concatenate(each), *[layer[part][name]["kernel"] for name in names])
        for name in names:
            layer[part][name]["kernel"] = whole if name == names[0] else jax.tree.map(lambda _: None, whole)
    return layer


def _parted(layer: Tree, shapes: Tree, axes: Tree) -> Tree:
    """The kernels for themselves, given what was joined with inputs first."""
    for part, names in _joins(shapes, axes):
        if jax.tree.leaves(layer[part][names[-1]]["kernel"]):
            continue
        whole = layer[part][names[0]]["kernel"]
        for index, name in enumerate(names):
            own = [shapes[part][other]["kernel"] for other in (name, *names[:index])]
            layer[part][name]["kernel"] = jax.tree.map(_cut, axes[part][name]["kernel"], whole, *own, is_leaf=is_axes)
    return layer


def _joins(shapes: Tree, axes: Tree) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Parts of a layer whose projections can lie together: they are there, in one number format, and differ at most in
    the first dimension of their outputs."""
    for part, names in JOINED.items():
        if all("kernel" in shapes[part].get(name, {}) for name in names):
            kernels = [(axes[part][name]["kernel"], shapes[part][name]["kernel"]) for name in names]
            besides = [jax.tree.map(_beside, *kernel, is_leaf=is_axes) for kernel in kernels]
            if all(beside == besides[0] for beside in besides):
                yield part, names


def _beside(names: LogicalAxes, own: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The dimensions in which arrays must agree to be joined."""
    axis = int(names[0] == "embed")
    return (*own.shape[:axis], *own.shape[axis + 1 :])


def _cut(names: LogicalAxes, whole: jax.Array, own: jax.ShapeDtypeStruct, *before: jax.ShapeDtypeStruct) -> jax.Array:
    """The part of a joined array, inputs first if it has any, that comes after others."""
    axis = int(names[0] == "embed")
    start = sum(other.shape[axis] for other in before)
    return jax.lax.slice_in_dim(whole, start, start + own.shape[axis], axis=axis)


def _in_order(blocks: dict[str, Tree]) -> list[Tree]:
    return [blocks[str(index)] for index in range(len(blocks))]


def _map(function: Callable[..., Any], axes: Tree, weights: Tree) -> Tree:
    """function(path, logical axes, weight) of every weight there is."""

    def of(keys: jax.tree_util.KeyPath, names: LogicalAxes, weight: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return None if weight is None else function(path, names, weight)

    return jax.tree_util.tree_map_with_path(of, axes, weights, is_leaf=is_axes)


def _turned(path: str, names: LogicalAxes, weight: jax.Array) -> jax.Array:
    """The weight with its outputs first."""
    source, target = _move(names)
    return jnp.moveaxis(weight, source, target)


def _turned_back(path: str, names: LogicalAxes, weight: jax.Array) -> jax.Array:
    source, target = _move(names)
    return jnp.moveaxis(weight, target, source)


def _move(names: LogicalAxes) -> tuple[int, int]:
    """The dimension of the residual stream goes last where it is the input, first where it is the output.

    The embedding has its outputs, the vocabulary, first already; positions are looked up; the products of experts want
    them as they are.
    """
    if names and names[0] == "experts":
        return 0, 0
    if len(names) > 1 and names[0] == "embed":
        return 0, -1
    if len(names) > 1 and names[-1] == "embed" and names[0] not in ("vocab", "positions"):
        return -1, 0
    return 0, 0
