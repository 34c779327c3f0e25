"""Mapping between a family's HF tensors and the parameters of a model, layer by layer.

A TensorLayout converts one tensor to the parameters it holds and back; `map_params` finds the rows of a table that
apply to a model.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxhydra.convert.name_table import SCORE, Join, Table, Weight
from maxhydra.model import ModelDef

Shape = tuple[int, ...]
Keys = tuple[str, ...]
# Sections of the parameter tree whose next key is the index of a layer.
LAYERED = ("prefix", "pattern", "remainder", "mtp")
# Sections of the stacked layers of the image encoder and the audio encoder.
VISION_LAYERS, AUDIO_LAYERS = ENCODER_LAYERS = (("vision", "layers"), ("audio", "layers"))


def speech_layers(name: str) -> Keys:
    """Section of the stacked layers of a decoder of codes."""
    return "speech", name, "decoder", "layers"


class TensorLayout:
    """A table row at the sizes of a model: `shapes` are the parameters' shapes, `heads` the groups of Join.heads."""

    def __init__(self, row: Weight, shapes: Sequence[Shape], heads: int):
        self.row, self.shapes = row, tuple(shapes)
        first_output = row.leading + row.inputs
        self._leading = self.shapes[0][: row.leading]
        self._inputs = math.prod(self.shapes[0][row.leading : first_output])
        self._outputs = [math.prod(shape[first_output:]) for shape in self.shapes]
        groups = {Join.parts: 1, Join.heads: heads, Join.interleaved: self._outputs[0]}
        self._groups = groups[row.join] if len(self.shapes) > 1 else 1
        has_outputs = len(self.shapes[0]) > first_output
        self.hf_shape = self._hf_shape(has_inputs=row.inputs > 0, has_outputs=has_outputs)

    def _hf_shape(self, *, has_inputs: bool, has_outputs: bool) -> Shape:
        inputs = [self._inputs] if has_inputs else []
        if self.row.has_split_inputs:
            inputs = list(self.shapes[0][self.row.leading : self.row.leading + self.row.inputs])
        outputs = [sum(self._outputs)] if has_outputs else []
        shape = [*self._leading, *(outputs + inputs if self.row.transposed else inputs + outputs)]
        axes = self.row.singleton_axis
        for axis in (axes,) if isinstance(axes, int) else axes or ():
            shape.insert(axis, 1)
        return tuple(shape)

    def from_hf(self, tensor: np.ndarray, *, interleaved_rope: bool) -> list[np.ndarray]:
        """Split a tensor into its parameters. `interleaved_rope`: feature order of the tensor (see Weight)."""
        sizes = (sum(self._outputs), self._inputs) if self.row.transposed else (self._inputs, sum(self._outputs))
        flat = tensor.reshape(*self._leading, *sizes)
        flat = flat.swapaxes(-1, -2) if self.row.transposed else flat
        grouped = flat.reshape(*self._leading, self._inputs, self._groups, -1)
        boundaries = np.cumsum([size // self._groups for size in self._outputs])[:-1]
        parts = np.split(grouped, boundaries, axis=-1)
        params = [self._ordered_inputs(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]
        params = [_from_axial(param) for param in params] if self.row.axial_rope else params
        return [_regroup(param, (-1, 2)) for param in params] if interleaved_rope else params

    def to_hf(self, params: Sequence[np.ndarray], *, interleaved_rope: bool) -> np.ndarray:
        """Inverse of `from_hf`."""
        params = [_regroup(param, (2, -1)) for param in params] if interleaved_rope else params
        params = [_to_axial(param) for param in params] if self.row.axial_rope else params
        if order := self.row.input_order:
            params = [param.transpose(*order, *range(len(order), param.ndim)) for param in params]
        parts = [param.reshape(*self._leading, self._inputs, self._groups, -1) for param in params]
        flat = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        flat = flat.reshape(*self._leading, self._inputs, -1)
        flat = flat.swapaxes(-1, -2) if self.row.transposed else flat
        # Contiguous arrays have at least one axis.
        return np.ascontiguousarray(flat).reshape(self.hf_shape)

    def _ordered_inputs(self, part: np.ndarray, shape: Shape) -> np.ndarray:
        """A part of a tensor in the shape of its parameter."""
        if not (order := self.row.input_order):
            return part.reshape(shape)
        split = part.reshape(*(shape[axis] for axis in order), *shape[len(order) :])
        return split.transpose(*np.argsort(order), *range(len(order), len(shape)))


def _from_axial(param: np.ndarray) -> np.ndarray:
    """Reorder the last axis, whose quarters are the two halves of the column and of the row (Weight.axial_rope)."""
    split = param.reshape(*param.shape[:-1], 2, 2, -1)
    return split[..., ::-1, :, :].swapaxes(-3, -2).reshape(param.shape)


def _to_axial(param: np.ndarray) -> np.ndarray:
    """Inverse of `_from_axial`."""
    split = param.reshape(*param.shape[:-1], 2, 2, -1)
    return split.swapaxes(-3, -2)[..., ::-1, :, :].reshape(param.shape)


def _regroup(param: np.ndarray, pairs: tuple[int, int]) -> np.ndarray:
    """Reorder the last axis: (-1, 2) converts interleaved RoPE pairs to halves, (2, -1) halves to interleaved pairs."""
    split = param.reshape(*param.shape[:-1], *pairs)
    return split.swapaxes(-1, -2).reshape(param.shape)


@dataclasses.dataclass(frozen=True)
class TensorIndex:
    """One tensor of a mapping: its layer and expert, and its index in each of the mapping's parameters."""

    layer: int | None
    expert: int | None
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ParamMapping:
    """A table row and the parameters that its tensors fill; a scanned stack of layers takes one tensor per layer."""

    row: Weight
    keys: tuple[Keys, ...]
    """Path of each parameter in the tree."""
    layers: tuple[int | None, ...]
    is_stacked: bool
    experts: int | None
    layout: TensorLayout
    """Layout of one tensor, without the axes of stacked layers and per-expert tensors."""

    @property
    def tensors(self) -> Iterator[TensorIndex]:
        for position, layer in enumerate(self.layers):
            outer = (position,) if self.is_stacked else ()
            if self.experts is None:
                yield TensorIndex(layer, None, outer)
            else:
                yield from (TensorIndex(layer, expert, (*outer, expert)) for expert in range(self.experts))

    @property
    def stack_shape(self) -> Shape:
        """Leading axes of the parameters that index tensors: layers, then experts."""
        return (*((len(self.layers),) if self.is_stacked else ()), *(() if self.experts is None else (self.experts,)))

    def tensor_name(self, tensor: TensorIndex, *, is_gguf: bool = False) -> str:
        return (self.row.gguf if is_gguf else self.row.hf).format(layer=tensor.layer, expert=tensor.expert)


def map_params(table: Table, model: ModelDef) -> list[ParamMapping]:
    """Map every row of the table for which the model has parameters. See `unmapped_params` for the rest."""
    mappings = []
    for owner, shapes in _shapes_by_owner(model).items():
        rows = _rows_of(table, owner)
        mappings += [_map_row(row, owner, shapes, model) for row in rows if _has_params(shapes, row)]
    return mappings


def unmapped_params(table: Table, model: ModelDef) -> list[str]:
    """Parameters of the model without a row in the table."""
    mapped = {keys for mapping in map_params(table, model) for keys in mapping.keys}
    leaves = jax.tree_util.tree_leaves_with_path(model.shapes)
    return ["/".join(keys) for keys in (_keys(path) for path, _ in leaves) if keys not in mapped]


def _rows_of(table: Table, owner: Keys) -> tuple[Weight, ...]:
    """Rows of the layers of decoder, encoders or speech, or of parameters outside of layers."""
    if not owner:
        return (*table.non_layer, SCORE)
    rows: dict[Keys, tuple[Weight, ...]] = {VISION_LAYERS: table.vision_layer, AUDIO_LAYERS: table.audio_layer}
    rows |= {speech_layers(name): layer for name, layer in table.speech_layers.items()}
    return rows.get(owner, () if _is_stack(owner) else table.layer)


def _is_stack(keys: Keys) -> bool:
    """Whether a path is that of stacked layers outside the decoder."""
    return keys in ENCODER_LAYERS or (len(keys) == 4 and keys == speech_layers(keys[1]))


def _owner(keys: Keys) -> Keys:
    """Path of the layer, or of the stacked layers, that a parameter belongs to; () outside the layers."""
    if keys[0] in LAYERED:
        return keys[:2]
    return next((keys[:length] for length in (2, 4) if _is_stack(keys[:length])), ())


def _has_params(shapes: Mapping[str, Shape], row: Weight) -> bool:
    """True if a layer has all parameters of a row and the one that the row requires, and not the one it excludes."""
    is_kind = (not row.requires or row.requires in shapes) and row.excludes not in shapes
    return is_kind and all(path in shapes for path in row.paths)


def _shapes_by_owner(model: ModelDef) -> dict[Keys, dict[str, Shape]]:
    """Path of a layer, () outside the layers -> relative parameter path -> shape."""
    shapes: dict[Keys, dict[str, Shape]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
        keys = _keys(path)
        owner = _owner(keys)
        shapes.setdefault(owner, {})["/".join(keys[len(owner) :])] = leaf.shape
    return shapes


def _map_row(row: Weight, owner: Keys, shapes: Mapping[str, Shape], model: ModelDef) -> ParamMapping:
    is_stacked = owner[:1] == ("pattern",) or _is_stack(owner)
    first_shape = shapes[row.paths[0]]
    outer = 1 if is_stacked else 0
    experts = first_shape[outer] if row.is_by_expert else None
    inner = outer if experts is None else outer + 1
    heads_shape = shapes[row.heads or row.paths[0]][inner:]
    first_output = row.leading + row.inputs
    heads = heads_shape[first_output] if len(heads_shape) > first_output else 1
    return ParamMapping(
        row=row,
        keys=tuple((*owner, *path.split("/")) for path in row.paths),
        layers=_layer_numbers(owner, first_shape[0], model),
        is_stacked=is_stacked,
        experts=experts,
        layout=TensorLayout(row, [shapes[path][inner:] for path in row.paths], heads),
    )


def _layer_numbers(owner: Keys, stack_size: int, model: ModelDef) -> tuple[int | None, ...]:
    """Numbers of the layers that a parameter holds; MTP layers are numbered after the last decoder layer."""
    if not owner:
        return (None,)
    if _is_stack(owner):
        return tuple(range(stack_size))
    section, position, count = owner[0], int(owner[1]), model.config.num_layers
    if section == "pattern":
        start, length = len(model.config.prefix), len(model.shapes["pattern"])
        return tuple(start + position + repetition * length for repetition in range(stack_size))
    first = {"prefix": 0, "remainder": count - len(model.shapes.get("remainder", {})), "mtp": count}
    return (first[section] + position,)


def _keys(path: Any) -> Keys:
    return tuple(entry.key for entry in path)
