"""A student that begins with some of its teacher's layers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config import ConfigError, Problem
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

Tree = Any
# Where the layers of a model lie; all else stands at its two ends.
GROUPS = ("prefix", "pattern", "remainder")


def inherit(student: ModelDef, teacher: ModelDef, weights: Tree, layers: Sequence[int], *, sharder: Sharder) -> Tree:
    """The student's weights: layer i is the teacher's layers[i], embedding, final norm and head are the teacher's."""
    build = _builder(student, teacher, layers)
    _require_same(student.shapes, jax.eval_shape(build, teacher.shapes))
    return jax.jit(build, out_shardings=sharder.tree(student.axes))(weights)


def check_layers(path: str, layers: Sequence[int], model: ModelDef, *, of: str) -> None:
    """Layers must be there."""
    last = model.config.num_layers - 1
    if any(layer > last for layer in layers):
        raise ConfigError(Problem(path, f"names a layer that the {of} has not", value=layers, accepted=f"0 to {last}"))


def _builder(student: ModelDef, teacher: ModelDef, layers: Sequence[int]) -> Any:
    config = student.config
    if len(layers) != config.num_layers:
        reason = f"names {len(layers)} layers, the student has model.num_layers={config.num_layers}"
        raise ConfigError(Problem("task.init_layers", reason, value=layers))
    check_layers("task.init_layers", layers, teacher, of="teacher")
    dtype = jnp.dtype(config.dtypes.weights.value)

    def build(weights: Tree) -> Tree:
        own = [_layer(teacher, weights, layer) for layer in layers]
        before, period, repeated = _layout(student)
        stacks = [own[before + place : before + repeated : period] for place in range(period)]
        groups = {
            "prefix": own[:before],
            "pattern": [jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack) for stack in stacks],
            "remainder": own[before + repeated :],
        }
        ends = {name: tree for name, tree in weights.items() if name not in GROUPS}
        numbered = {group: {str(i): tree for i, tree in enumerate(trees)} for group, trees in groups.items() if trees}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), {**ends, **numbered})

    return build


def _layer(model: ModelDef, weights: Tree, layer: int) -> Tree:
    """The weights of one layer."""
    before, period, repeated = _layout(model)
    if layer < before:
        return weights["prefix"][str(layer)]
    if layer - before >= repeated:
        return weights["remainder"][str(layer - before - repeated)]
    repetition, place = divmod(layer - before, period)
    return jax.tree.map(lambda leaf: leaf[repetition], weights["pattern"][str(place)])


def _layout(model: ModelDef) -> tuple[int, int, int]:
    """Layers of the prefix, places of the pattern, layers of all its repetitions."""
    before, after = len(model.config.prefix), len(model.shapes.get("remainder", {}))
    return before, len(model.shapes.get("pattern", {})), model.config.num_layers - before - after


def _require_same(wanted: Tree, given: Tree) -> None:
    """Refuse a teacher whose arrays have other names or shapes, naming the first that has."""
    want, have = (
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (wanted, given))
    )
    for name in sorted({*want, *have}):
        if want.get(name) != have.get(name):
            told = f"{name} is {have.get(name, 'not there')} there, and {want.get(name, 'not there')} in the student"
            reason = f"needs a teacher that differs in its number of layers alone: {told}"
            raise ConfigError(Problem("task.init_layers", reason))
