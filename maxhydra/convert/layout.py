"""One tensor of theirs as arrays of ours and back, exactly: transposed, cut, joined, reordered, never computed."""

import math
from collections.abc import Sequence

import numpy as np

from maxhydra.convert.table import Join, Weight

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
