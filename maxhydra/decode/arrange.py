"""Weights laid out for decoding on a CPU, where a step is a few rows against every weight.

XLA for CPUs copies a layer's weights out of their stack before using them, and is fast for few rows only with the
weight as the left operand, outputs first in memory. So layers are taken out of their stacks, and weights turned round,
once; the programs turn them back, which the compiler folds into the product. Products of SmolLM2 (135M, float32, 2
cores): a third less time at batch 1, half at batch 8. Programs take longer to compile, as every layer is written out.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config.model import Projection
from maxhydra.model import ModelDef, build
from maxhydra.sharding import LogicalAxes, Sharder, is_axes

Tree = Any


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A model for the programs, and how its weights are kept."""

    model: ModelDef
    keep: Callable[[Tree], Tree]
    """Weights as the model at large has them -> as the engine keeps them."""
    use: Callable[[Tree], Tree]
    """As they are kept -> as `model` takes them; inside a program."""


def arrange(model: ModelDef, sharder: Sharder) -> Arrangement:
    """The layout that suits the devices: on one CPU as described above, elsewhere as it is."""
    if sharder.mesh.size > 1 or jax.default_backend() != "cpu":
        return Arrangement(model, keep=lambda params: params, use=lambda params: params)
    flat = flattened(model)
    return Arrangement(flat, keep=partial(_kept, model, flat), use=partial(_turned, axes=flat.axes, back=True))


def flattened(model: ModelDef) -> ModelDef:
    """The same model with every layer written out."""
    config = model.config
    repeated = config.num_layers - len(config.prefix)
    pattern = [config.pattern[index % len(config.pattern)] for index in range(repeated)]
    kernels = dataclasses.replace(config.kernels, projection=Projection.outputs_first)
    return build(dataclasses.replace(config, prefix=[*config.prefix, *pattern], kernels=kernels), model.adapter)


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


def _kept(model: ModelDef, flat: ModelDef, params: Tree) -> Tree:
    """Layer by layer, so that beside the two copies of all weights there is room for one layer more at most."""
    ends = {name: part for name, part in params.items() if name not in ("prefix", "pattern", "remainder")}
    kept = {name: _turned(part, axes=flat.axes[name], back=False) for name, part in ends.items()}
    layers = enumerate(unstacked(model, params))
    kept["prefix"] = {str(n): _turned(layer, axes=flat.axes["prefix"][str(n)], back=False) for n, layer in layers}
    return kept


def _in_order(blocks: dict[str, Tree]) -> list[Tree]:
    return [blocks[str(index)] for index in range(len(blocks))]


def _turned(params: Tree, *, axes: Tree, back: bool) -> Tree:
    """Every weight with its outputs first; `back` undoes it."""

    def turn(names: LogicalAxes, weight: jax.Array) -> jax.Array:
        source, target = _move(names)
        return jnp.moveaxis(weight, target, source) if back else jnp.moveaxis(weight, source, target)

    return jax.tree.map(turn, axes, params, is_leaf=is_axes)


def _move(names: LogicalAxes) -> tuple[int, int]:
    """The dimension of the residual stream goes last where it is the input, first where it is the output.

    The embedding has its outputs, the vocabulary, first already.
    """
    if len(names) > 1 and names[0] == "embed":
        return 0, -1
    if len(names) > 1 and names[-1] == "embed" and names[0] != "vocab":
        return -1, 0
    return 0, 0
