"""Initialization of a student with some of its teacher's layers."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from maxhydra.config import ConfigError, Problem
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train.loss import Tree

# The subtrees of the weights that hold layers; the others are embedding, final norm and head.
LAYER_GROUPS = ("prefix", "pattern", "remainder")


def init_from_teacher(
    student: ModelDef, teacher: ModelDef, weights: Tree, layers: Sequence[int], *, sharder: Sharder
) -> Tree:
    """Student weights: layer i is the teacher's layers[i]; embedding, final norm and head are the teacher's."""
    build = _make_builder(student, teacher, layers)
    _require_same_shapes(student.shapes, jax.eval_shape(build, teacher.shapes))
    return jax.jit(build, out_shardings=sharder.tree(student.axes))(weights)


def check_layers(path: str, layers: Sequence[int], model: ModelDef, *, of: str) -> None:
    """Raise a ConfigError if the model does not have one of the layers."""
    last = model.config.num_layers - 1
    if any(layer > last for layer in layers):
        reason = f"names a layer that the {of} does not have"
        raise ConfigError(Problem(path, reason, value=layers, accepted=f"0 to {last}"))


def _make_builder(student: ModelDef, teacher: ModelDef, layers: Sequence[int]) -> Callable[[Tree], Tree]:
    config = student.config
    if len(layers) != config.num_layers:
        reason = f"names {len(layers)} layers, but the student has model.num_layers={config.num_layers}"
        raise ConfigError(Problem("task.init_layers", reason, value=layers))
    check_layers("task.init_layers", layers, teacher, of="teacher")
    dtype = jnp.dtype(config.dtypes.weights.value)

    def build(weights: Tree) -> Tree:
        student_layers = [_layer(teacher, weights, layer) for layer in layers]
        prefix, period, repeated = _layout(student)
        stacks = [student_layers[prefix + index : prefix + repeated : period] for index in range(period)]
        groups = {
            "prefix": student_layers[:prefix],
            "pattern": [jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack) for stack in stacks],
            "remainder": student_layers[prefix + repeated :],
        }
        others = {name: tree for name, tree in weights.items() if name not in LAYER_GROUPS}
        numbered = {group: {str(i): tree for i, tree in enumerate(trees)} for group, trees in groups.items() if trees}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), {**others, **numbered})

    return build


def _layer(model: ModelDef, weights: Tree, layer: int) -> Tree:
    """The weights of one layer."""
    prefix, period, repeated = _layout(model)
    if layer < prefix:
        return weights["prefix"][str(layer)]
    if layer - prefix >= repeated:
        return weights["remainder"][str(layer - prefix - repeated)]
    repetition, index = divmod(layer - prefix, period)
    return jax.tree.map(lambda leaf: leaf[repetition], weights["pattern"][str(index)])


def _layout(model: ModelDef) -> tuple[int, int, int]:
    """Number of layers in the prefix, in one period of the pattern, and in all its repetitions."""
    prefix, remainder = len(model.config.prefix), len(model.shapes.get("remainder", {}))
    return prefix, len(model.shapes.get("pattern", {})), model.config.num_layers - prefix - remainder


def _require_same_shapes(expected: Tree, given: Tree) -> None:
    """Reject a teacher whose arrays have other names or shapes, naming the first difference."""
    student_shapes, teacher_shapes = (
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (expected, given))
    )
    for name in sorted({*student_shapes, *teacher_shapes}):
        student, teacher = student_shapes.get(name, "missing"), teacher_shapes.get(name, "missing")
        if student != teacher:
            difference = f"{name} is {teacher} in the teacher and {student} in the student"
            reason = f"needs a teacher that differs from the student only in its number of layers: {difference}"
            raise ConfigError(Problem("task.init_layers", reason))
