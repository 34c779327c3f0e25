"""Where the rows of a table stand in a model: which of its arrays each tensor of theirs fills, and which layer."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxhydra.convert.name_table import Join, Table, Weight
from maxhydra.model import ModelDef

Shape = tuple[int, ...]


class Layout:
    """A row of a table at the sizes of a model: `shapes` are those of its arrays, `heads` the groups of Join.heads."""

    def __init__(self, row: Weight, shapes: Sequence[Shape], heads: int):
        self.row, self.shapes = row, tuple(shapes)
        after = row.leading + row.inputs
        self._leading = self.shapes[0][: row.leading]
        self._inputs = math.prod(self.shapes[0][row.leading : after])
        self._outputs = [math.prod(shape[after:]) for shape in self.shapes]
        groups = {Join.parts: 1, Join.heads: heads, Join.interleaved: self._outputs[0]}
        self._groups = groups[row.join] if len(self.shapes) > 1 else 1
        self.their_shape = self._their_shape(has_inputs=row.inputs > 0, has_outputs=len(self.shapes[0]) > after)

    def _their_shape(self, *, has_inputs: bool, has_outputs: bool) -> Shape:
        axes = [self._inputs] if has_inputs else []
        axes = [*axes, sum(self._outputs)] if has_outputs else axes
        shape = [*self._leading, *(axes[::-1] if self.row.turned else axes)]
        if self.row.single_axis is not None:
            shape.insert(self.row.single_axis, 1)
        return tuple(shape)

    def ours(self, theirs: np.ndarray, *, neighbours: bool) -> list[np.ndarray]:
        """The arrays that a tensor holds. `neighbours`: in which order its heads' numbers stand (Weight)."""
        sizes = (sum(self._outputs), self._inputs) if self.row.turned else (self._inputs, sum(self._outputs))
        flat = theirs.reshape(*self._leading, *sizes)
        flat = flat.swapaxes(-1, -2) if self.row.turned else flat
        grouped = flat.reshape(*self._leading, self._inputs, self._groups, -1)
        ends = np.cumsum([size // self._groups for size in self._outputs])[:-1]
        parts = np.split(grouped, ends, axis=-1)
        arrays = [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return [_paired(array, (-1, 2)) for array in arrays] if neighbours else arrays

    def theirs(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor that holds these arrays, in the order of the Hugging Face row."""
        arrays = [_paired(array, (2, -1)) for array in ours] if self.row.neighbours else ours
        parts = [array.reshape(*self._leading, self._inputs, self._groups, -1) for array in arrays]
        flat = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        flat = flat.reshape(*self._leading, self._inputs, -1)
        flat = flat.swapaxes(-1, -2) if self.row.turned else flat
        return np.ascontiguousarray(flat.reshape(self.their_shape))


def _paired(array: np.ndarray, pairs: tuple[int, int]) -> np.ndarray:
    """The last axis read in pairs (-1, 2), neighbours to halves, or in halves (2, -1), and the other way round."""
    split = array.reshape(*array.shape[:-1], *pairs)
    return split.swapaxes(-1, -2).reshape(array.shape)


Keys = tuple[str, ...]
# Parts of the tree whose next key is the place of a layer.
LAYERED = ("prefix", "pattern", "remainder", "mtp")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of theirs: its layer and expert, and its index in each array of the place."""

    layer: int | None
    expert: int | None
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """A row of the table, and the arrays of our tree that its tensors fill: those of stacked layers, one for each."""

    row: Weight
    keys: tuple[Keys, ...]
    layers: tuple[int | None, ...]
    is_stacked: bool
    experts: int | None
    layout: Layout
    """Of one tensor: without the axes of layers and of experts that are tensors of their own."""

    @property
    def tensors(self) -> Iterator[Tensor]:
        for at, layer in enumerate(self.layers):
            outer = (at,) if self.is_stacked else ()
            if self.experts is None:
                yield Tensor(layer, None, outer)
            else:
                yield from (Tensor(layer, expert, (*outer, expert)) for expert in range(self.experts))

    @property
    def counted(self) -> Shape:
        """The axes of our arrays that count tensors."""
        return (*((len(self.layers),) if self.is_stacked else ()), *(() if self.experts is None else (self.experts,)))

    def name(self, tensor: Tensor, *, is_gguf: bool = False) -> str:
        """What the files call it."""
        return (self.row.gguf if is_gguf else self.row.hf).format(layer=tensor.layer, expert=tensor.expert)


def map_params(table: Table, model: ModelDef) -> list[Place]:
    """Every row that the model has arrays for. Those that no row has are `unmapped_params`."""
    found = []
    for owner, arrays in _owners(model).items():
        rows = table.layer if owner else table.ends
        found += [_place(row, owner, arrays, model) for row in rows if _has(arrays, row)]
    return found


def unmapped_params(table: Table, model: ModelDef) -> list[str]:
    """Arrays of the model that the table has no row for."""
    covered = {keys for place in map_params(table, model) for keys in place.keys}
    leaves = jax.tree_util.tree_leaves_with_path(model.shapes)
    return ["/".join(keys) for keys in (_keys(path) for path, _ in leaves) if keys not in covered]


def _has(arrays: Mapping[str, Shape], row: Weight) -> bool:
    """Whether a layer has all that a row is of."""
    return all(path in arrays for path in row.paths) and (not row.beside or row.beside in arrays)


def _owners(model: ModelDef) -> dict[Keys, dict[str, Shape]]:
    """Place of a layer, or of none: path below it -> shape."""
    found: dict[Keys, dict[str, Shape]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
        keys = _keys(path)
        owner = keys[:2] if keys[0] in LAYERED else ()
        found.setdefault(owner, {})["/".join(keys[len(owner) :])] = leaf.shape
    return found


def _place(row: Weight, owner: Keys, arrays: Mapping[str, Shape], model: ModelDef) -> Place:
    is_stacked = owner[:1] == ("pattern",)
    first = arrays[row.paths[0]]
    outer = 1 if is_stacked else 0
    experts = first[outer] if row.is_by_expert else None
    inner = outer if experts is None else outer + 1
    shapes = [arrays[path][inner:] for path in row.paths]
    heads = arrays[row.heads or row.paths[0]][inner:]
    after = row.leading + row.inputs
    return Place(
        row=row,
        keys=tuple((*owner, *path.split("/")) for path in row.paths),
        layers=_layers(owner, first[0], model),
        is_stacked=is_stacked,
        experts=experts,
        layout=Layout(row, shapes, heads[after] if len(heads) > after else 1),
    )


def _layers(owner: Keys, stacked: int, model: ModelDef) -> tuple[int | None, ...]:
    """Numbers of the layers that an array holds; those that predict further tokens count on from the last."""
    if not owner:
        return (None,)
    part, place, count = owner[0], int(owner[1]), model.config.num_layers
    if part == "pattern":
        before, length = len(model.config.prefix), len(model.shapes["pattern"])
        return tuple(before + place + repetition * length for repetition in range(stacked))
    first = {"prefix": 0, "remainder": count - len(model.shapes.get("remainder", {})), "mtp": count}
    return (first[part] + place,)


def _keys(path: Any) -> Keys:
    return tuple(entry.key for entry in path)
