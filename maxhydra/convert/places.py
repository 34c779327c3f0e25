"""Where the rows of a table stand in a model: which of its arrays each tensor of theirs fills, and which layer."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from maxhydra.convert.layout import Layout, Shape
from maxhydra.convert.table import Table, Weight
from maxhydra.model import ModelDef

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


def places(table: Table, model: ModelDef) -> list[Place]:
    """Every row that the model has arrays for. Those that no row has are `unplaced`."""
    found = []
    for owner, arrays in _owners(model).items():
        rows = table.layer if owner else table.ends
        found += [_place(row, owner, arrays, model) for row in rows if _has(arrays, row)]
    return found


def unplaced(table: Table, model: ModelDef) -> list[str]:
    """Arrays of the model that the table has no row for."""
    covered = {keys for place in places(table, model) for keys in place.keys}
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
