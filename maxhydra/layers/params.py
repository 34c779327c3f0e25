"""How weights are made and used: initial values, logical axes, and the number format of each role."""

import dataclasses
import math
from collections.abc import Callable
from copy import copy
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import QuantizationKind
from maxhydra.layers.linear import Linear, Lora, LoraSpec, MatmulSpec
from maxhydra.layers.quant.amax_history import ARRAYS, AmaxHistory
from maxhydra.layers.quant.int4 import Int4, Shape
from maxhydra.layers.quant.int8 import Int8
from maxhydra.layers.quant.nf4 import Nf4
from maxhydra.layers.quant.rules import QuantRule
from maxhydra.sharding import LogicalAxes

# Keys of a layer that its own dropout takes.
FREE_KEYS = 2


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """Number formats by role, as `config.Dtypes` documents them."""

    weights: np.dtype
    compute: np.dtype
    softmax: np.dtype
    logits: np.dtype

    @classmethod
    def of(cls, dtypes: config.Dtypes) -> "Dtypes":
        return cls(**{field.name: jnp.dtype(getattr(dtypes, field.name).value) for field in dataclasses.fields(cls)})


class ParamBuilder:
    """Makes the weights of modules: initial values and logical axes, alone or stacked over layers.

    A key per weight in the order of making; values do not depend on how the weights are sharded, and those of the model
    not on its adapter.
    """

    def __init__(self, key: jax.Array, *, dtype: np.dtype, layers: int | None, product: MatmulSpec):
        self._key, self._dtype, self._product = key, dtype, product
        self._numbers = count(1)
        self._path = ""
        self._stack: tuple[int, ...] = () if layers is None else (layers,)
        self._stack_axes: LogicalAxes = () if layers is None else ("layers",)

    def stacked(self, layers: int) -> "ParamBuilder":
        """A maker of weights that hold so many layers, on a leading axis `layers`."""
        key = jax.random.fold_in(self._key, next(self._numbers))
        return ParamBuilder(key, dtype=self._dtype, layers=layers, product=self._product)

    def below(self, name: str) -> "ParamBuilder":
        """The same maker for a part of this name."""
        part = copy(self)
        part._path = f"{self._path}{name}/"
        return part

    def ones(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        return nnx.Param(jnp.ones(self._stack + shape, self._dtype), axes=self._stack_axes + axes)

    def zeros(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        return nnx.Param(jnp.zeros(self._stack + shape, self._dtype), axes=self._stack_axes + axes)

    def drawn(
        self, shape: tuple[int, ...], axes: LogicalAxes, draw: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    ) -> nnx.Param:
        """Values that a function of a key and a shape draws."""
        key = jax.random.fold_in(self._key, next(self._numbers))
        return nnx.Param(draw(key, self._stack + shape).astype(self._dtype), axes=self._stack_axes + axes)

    def matrix(
        self,
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        axes: LogicalAxes,
        *,
        std: float,
        is_wide: bool = False,
    ) -> nnx.Param:
        """Normal values in [*rows, *columns], drawn in float32 whatever format they are kept in.

        `is_wide`: they are used in that format too, not in that of the model's products.
        """
        key = jax.random.fold_in(self._key, next(self._numbers))
        drawn = self._normal(key, rows, columns, axes, std=std, dtype=self._dtype)
        drawn.set_metadata(is_wide=is_wide)
        return drawn

    def end(self, name: str, rows: int, columns: int, axes: LogicalAxes, *, std: float) -> nnx.Param | Int8:
        """A matrix between the vocabulary and the residual stream, whose products sum over the latter."""
        key = jax.random.fold_in(self._key, next(self._numbers))
        matrix = self._normal(key, (rows,), (columns,), axes, std=std, dtype=self._dtype)
        return Int8(matrix[...], axes, summed=("embed",)) if self._is_int8(name) else matrix

    def experts(
        self, name: str, count: int, shape: tuple[int, int], axes: tuple[str, str], *, std: float
    ) -> nnx.Param | Nf4 | Int8 | Int4:
        """A map [inputs, outputs] of each of so many experts."""
        drawn = self.matrix((count, shape[0]), (shape[1],), ("experts", *axes), std=std)
        return self._kept(drawn, Shape(len(self._stack), 1, 1), self._path + name)

    def named(self, name: str) -> tuple[str, QuantRule | None]:
        """A weight of this part as configs name it, and its format."""
        return self._path + name, self._product.format_of(self._path + name)

    def projection(
        self,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: LogicalAxes,
        *,
        scale: float,
        has_bias: bool = False,
    ) -> Linear:
        """A map from inputs of unit variance to outputs of variance scale^2: its entries have scale^2 / fan-in."""
        number = next(self._numbers)
        key = jax.random.fold_in(self._key, number)
        std = scale * math.prod(inputs) ** -0.5
        kernel = self._normal(key, inputs, outputs, axes, std=std, dtype=self._dtype)
        name = self._path + name
        spec, lora = self._product.lora, None
        if spec is not None and spec.adds_to(name):
            key = jax.random.fold_in(key, 1)
            lora = self._lora(spec, key, inputs, outputs, axes, number=FREE_KEYS + number)
        kept = self._kept(kernel, Shape(len(self._stack), 0, len(inputs)), name)
        bias = self.zeros(outputs, axes[len(inputs) :]) if has_bias else None
        history = self._history(name)
        return Linear(kept, lora, self._product, name=name, inputs=len(inputs), bias=bias, history=history)

    def _kept(self, kernel: nnx.Param, shape: Shape, name: str) -> nnx.Param | Nf4 | Int8 | Int4:
        """The kernel in the format that it is kept in."""
        axes, lora, form = kernel.get_metadata("axes"), self._product.lora, self._product.format_of(name)
        if lora is not None and lora.over_nf4 and not shape.experts:
            return Nf4(kernel[...], axes, inputs=shape.inputs, stacked=bool(self._stack), name=name)
        if form is not None and form.kind is QuantizationKind.int4_weights:
            return Int4(kernel[...], axes, shape, group=form.group, name=name)
        first = shape.stacked + shape.experts
        summed = axes[first : first + shape.inputs]
        return Int8(kernel[...], axes, summed=summed, leading=shape.experts) if self._is_int8(name) else kernel

    def _is_int8(self, name: str) -> bool:
        form = self._product.format_of(name)
        return form is not None and form.kind is QuantizationKind.int8_weights

    def _history(self, name: str) -> AmaxHistory | None:
        """Empty, where products are scaled by what was there before."""
        form = self._product.format_of(name)
        if form is None or form.history is None:
            return None
        empty = jnp.zeros((*self._stack, ARRAYS, form.history), jnp.float32)
        return AmaxHistory(empty, axes=(*self._stack_axes, None, None))

    def _lora(
        self,
        spec: LoraSpec,
        key: jax.Array,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: LogicalAxes,
        *,
        number: int,
    ) -> Lora:
        """Trained in float32 whatever the model is kept in: its steps are small."""
        into, out_of = (*axes[: len(inputs)], None), (None, *axes[len(inputs) :])
        std = (3 * math.prod(inputs)) ** -0.5
        a = self._normal(key, inputs, (spec.rank,), into, std=std, dtype=jnp.dtype(jnp.float32))
        b = jnp.zeros((*self._stack, spec.rank, *outputs), jnp.float32)
        return Lora(a, nnx.Param(b, axes=self._stack_axes + out_of), spec, number=number)

    def _normal(
        self,
        key: jax.Array,
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        axes: LogicalAxes,
        *,
        std: float,
        dtype: np.dtype,
    ) -> nnx.Param:
        """Drawn as a plain matrix: random numbers in four dimensions take XLA seconds to compile for a CPU."""
        flat = (*self._stack, math.prod(rows), math.prod(columns))
        values = std * jax.random.normal(key, flat, jnp.float32)
        shaped = values.astype(dtype).reshape(*self._stack, *rows, *columns)
        return nnx.Param(shaped, axes=self._stack_axes + axes)


def residual_scale(model: config.Model) -> float:
    """Scale of the last projection of each residual branch.

    The stream is a sum of 2 * num_layers branches; at 1 / sqrt(2 * num_layers) each, their sum has the variance of one,
    however deep the model is (Radford et al., 2019).
    """
    return model.init_scale * (2 * model.num_layers) ** -0.5
