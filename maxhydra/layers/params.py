"""Creation of weights: initial values, logical axes, storage formats, and dtypes by role."""

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
from maxhydra.layers.low_rank import LowRank
from maxhydra.layers.quant.four_bit import FourBit, Shape
from maxhydra.layers.quant.int4 import Int4
from maxhydra.layers.quant.int8 import Int8
from maxhydra.layers.quant.mxfp4 import Mxfp4
from maxhydra.layers.quant.nf4 import Nf4
from maxhydra.layers.quant.training import ARRAYS, AmaxHistory, QuantRule
from maxhydra.layers.weight_sampler import KeyPath, Sizes, WeightSampler
from maxhydra.sharding import LogicalAxes

# Dropout keys of a layer that its two residual branches use.
FREE_KEYS = 2


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """Dtypes by role, as documented in `config.Dtypes`."""

    weights: np.dtype
    compute: np.dtype
    softmax: np.dtype
    logits: np.dtype

    @classmethod
    def of(cls, dtypes: config.Dtypes) -> "Dtypes":
        return cls(**{field.name: jnp.dtype(getattr(dtypes, field.name).value) for field in dataclasses.fields(cls)})


class ParamBuilder:
    """Creates the weights of modules with initial values and logical axes, optionally stacked over layers.

    Every weight gets its own PRNG key in the order of creation. Values do not depend on the sharding, and those of the
    base model do not depend on an adapter. Without a key all random weights are zeros, and `sizes` is filled; with
    these sizes, a builder with a key samples faster.
    """

    def __init__(
        self,
        key: jax.Array | None,
        *,
        dtype: np.dtype,
        layers: int | None,
        matmul_spec: MatmulSpec,
        sizes: Sizes | None = None,
    ):
        self._sampler = WeightSampler(key, {} if sizes is None else sizes)
        self._dtype, self._matmul_spec = dtype, matmul_spec
        self._numbers = count(1)
        self._key_path: KeyPath = ()
        self._path = ""
        self._stack_over(layers)

    def _stack_over(self, layers: int | None) -> None:
        self._stack: tuple[int, ...] = () if layers is None else (layers,)
        self._stack_axes: LogicalAxes = () if layers is None else ("layers",)

    def stacked(self, layers: int) -> "ParamBuilder":
        """A builder of weights that are stacked over this many layers, on a leading axis `layers`."""
        builder = copy(self)
        builder._key_path, builder._numbers = self._next_path(), count(1)
        builder._stack_over(layers)
        return builder

    def _next_path(self) -> KeyPath:
        return (*self._key_path, next(self._numbers))

    def below(self, name: str) -> "ParamBuilder":
        """The same builder for a submodule of this name."""
        builder = copy(self)
        builder._path = f"{self._path}{name}/"
        return builder

    def full(self, shape: tuple[int, ...], axes: LogicalAxes, value: float) -> nnx.Param:
        return nnx.Param(jnp.full(self._stack + shape, value, self._dtype), axes=self._stack_axes + axes)

    def ones(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        return self.full(shape, axes, 1.0)

    def zeros(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        return self.full(shape, axes, 0.0)

    def random(
        self,
        shape: tuple[int, ...],
        axes: LogicalAxes,
        sample: Callable[[jax.Array, tuple[int, ...]], jax.Array],
        *,
        dtype: np.dtype | None = None,
    ) -> nnx.Param:
        """Random values from a function of key and shape. `dtype`: if it is not that of the other weights."""
        key, stacked = self._sampler.key(self._next_path()), self._stack + shape
        values = jnp.zeros(stacked) if key is None else sample(key, stacked)
        return nnx.Param(values.astype(dtype or self._dtype), axes=self._stack_axes + axes)

    def matrix(
        self,
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        axes: LogicalAxes,
        *,
        std: float,
        is_wide: bool = False,
    ) -> nnx.Param:
        """Normal values [*rows, *columns], sampled in float32 for any dtype.

        `is_wide`: the matrix is used in its own dtype, not in the compute dtype.
        """
        matrix = self._normal(self._next_path(), rows, columns, axes, std=std, dtype=self._dtype)
        matrix.set_metadata(is_wide=is_wide)
        return matrix

    def vocabulary_matrix(
        self, name: str, rows: int, columns: int, axes: LogicalAxes, *, std: float
    ) -> tuple[nnx.Param | Int8, LowRank | None]:
        """The embedding or head matrix, and its LoRA update; as a head it is contracted over the residual stream."""
        path = self._next_path()
        matrix = self._normal(path, (rows,), (columns,), axes, std=std, dtype=self._dtype)
        stored = Int8(matrix[...], axes, summed=("embed",)) if self._is_int8(name) else matrix
        # A lookup has one nonzero input.
        fan_in = 1 if axes[0] == "vocab" else rows
        return stored, self._low_rank(name, path, (rows,), columns, axes, fan_in=fan_in)

    def experts(
        self, name: str, count: int, shape: tuple[int, int], axes: tuple[str, str], *, std: float
    ) -> tuple[nnx.Param | Nf4 | Int8 | FourBit, LowRank | None]:
        """A kernel [inputs, outputs] for each of `count` experts, and their LoRA updates."""
        path, rows, names = self._next_path(), (count, shape[0]), ("experts", *axes)
        kernels = self._normal(path, rows, (shape[1],), names, std=std, dtype=self._dtype)
        kernels.set_metadata(is_wide=False)
        stored = self._store(kernels, Shape(len(self._stack), 1, 1), self._path + name)
        return stored, self._low_rank(self._path + name, path, rows, shape[1], names, fan_in=shape[0])

    def named(self, name: str) -> tuple[str, QuantRule | None]:
        """Full name of a weight of this module, as config targets match it, and its quantization rule."""
        return self._path + name, self._matmul_spec.format_of(self._path + name)

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
        """A projection with kernel variance scale^2 / fan-in: unit-variance inputs give outputs of variance scale^2."""
        path = self._next_path()
        std = scale * math.prod(inputs) ** -0.5
        kernel = self._normal(path, inputs, outputs, axes, std=std, dtype=self._dtype)
        name = self._path + name
        spec, lora = self._matmul_spec.lora, None
        if spec is not None and spec.adds_to(name):
            lora = self._lora(spec, path, inputs, outputs, axes)
        stored = self._store(kernel, Shape(len(self._stack), 0, len(inputs)), name)
        bias = self.zeros(outputs, axes[len(inputs) :]) if has_bias else None
        history = self._history(name)
        return Linear(stored, lora, self._matmul_spec, name=name, inputs=len(inputs), bias=bias, history=history)

    def _store(self, kernel: nnx.Param, shape: Shape, name: str) -> nnx.Param | Nf4 | Int8 | FourBit:
        """The kernel in its storage format."""
        axes, lora, rule = kernel.get_metadata("axes"), self._matmul_spec.lora, self._matmul_spec.format_of(name)
        if lora is not None and lora.over_nf4 and not shape.experts:
            return Nf4(kernel[...], axes, inputs=shape.inputs, stacked=bool(self._stack), name=name)
        if rule is not None and rule.kind is QuantizationKind.int4_weights:
            return Int4(kernel[...], axes, shape, group=rule.group, name=name)
        if rule is not None and rule.kind is QuantizationKind.mxfp4_weights:
            return Mxfp4(kernel[...], axes, shape, name=name)
        first = shape.stacked + shape.experts
        summed = axes[first : first + shape.inputs]
        return Int8(kernel[...], axes, summed=summed, leading=shape.experts) if self._is_int8(name) else kernel

    def _is_int8(self, name: str) -> bool:
        rule = self._matmul_spec.format_of(name)
        return rule is not None and rule.kind is QuantizationKind.int8_weights

    def _history(self, name: str) -> AmaxHistory | None:
        """An empty amax history for projections with delayed scaling; None for others."""
        rule = self._matmul_spec.format_of(name)
        if rule is None or rule.history is None:
            return None
        empty = jnp.zeros((*self._stack, ARRAYS, rule.history), jnp.float32)
        return AmaxHistory(empty, axes=(*self._stack_axes, None, None))

    def _lora(
        self,
        spec: LoraSpec,
        path: KeyPath,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: LogicalAxes,
    ) -> Lora:
        """LoRA matrices, always in float32: their updates are small."""
        number = FREE_KEYS + path[-1]
        a_axes, b_axes = (*axes[: len(inputs)], None), (None, *axes[len(inputs) :])
        if spec.slots:
            return self._stacked_loras(spec, inputs, outputs, (a_axes, b_axes), number=number)
        std = (3 * math.prod(inputs)) ** -0.5
        a = self._normal((*path, 1), inputs, (spec.rank,), a_axes, std=std, dtype=jnp.dtype(jnp.float32))

        zeros = self._adapter_zeros
        b = zeros((spec.rank, *outputs), b_axes)
        # model/lora.py replaces these zeros, which depend on the base weights.
        magnitude = zeros(outputs, axes[len(inputs) :]) if spec.has_magnitude else None
        start = (zeros((*inputs, spec.rank), a_axes), zeros((spec.rank, *outputs), b_axes)) if spec.has_start else None
        return Lora(a, b, spec, number=number, magnitude=magnitude, start=start)

    def _low_rank(
        self,
        name: str,
        path: KeyPath,
        rows: tuple[int, ...],
        columns: int,
        axes: LogicalAxes,
        *,
        fan_in: int,
    ) -> LowRank | None:
        """The LoRA update of a weight [*rows, columns] that is not a projection; None if it has none."""
        spec = self._matmul_spec.lora
        if spec is None or not spec.adds_to_parameter(name):
            return None
        a_axes, b_axes = (*axes[:-1], None), (*axes[:-2], None, axes[-1])
        a_shape, b_shape = (*rows, spec.rank), (*rows[:-1], spec.rank, columns)
        std = (3 * fan_in) ** -0.5
        a = self._normal((*path, 1), rows, (spec.rank,), a_axes, std=std, dtype=jnp.dtype(jnp.float32))
        zeros = self._adapter_zeros
        start = (zeros(a_shape, a_axes), zeros(b_shape, b_axes)) if spec.has_start else None
        return LowRank(a, zeros(b_shape, b_axes), spec, start=start)

    def _adapter_zeros(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        return nnx.Param(jnp.zeros((*self._stack, *shape), jnp.float32), axes=self._stack_axes + axes)

    def _stacked_loras(
        self,
        spec: LoraSpec,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[LogicalAxes, LogicalAxes],
        *,
        number: int,
    ) -> Lora:
        """Matrices of several adapters, which are loaded later, in the compute dtype."""
        shapes = (spec.slots, *inputs, spec.rank), (spec.slots, spec.rank, *outputs)
        a, b = (
            nnx.Param(
                jnp.zeros((*self._stack, *shape), self._matmul_spec.compute), axes=(*self._stack_axes, None, *own)
            )
            for shape, own in zip(shapes, axes, strict=True)
        )
        return Lora(a, b, spec, number=number)

    def _normal(
        self,
        path: KeyPath,
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        axes: LogicalAxes,
        *,
        std: float,
        dtype: np.dtype,
    ) -> nnx.Param:
        """Sampled as a matrix: random numbers in four dimensions take XLA seconds to compile for CPUs."""
        flat = (*self._stack, math.prod(rows), math.prod(columns))
        values = self._sampler.normal(path, flat, std=std).astype(dtype)
        return nnx.Param(values.reshape(*self._stack, *rows, *columns), axes=self._stack_axes + axes)


def width_ratio(model: config.Model) -> float:
    """Width of the model relative to the base of model.transfer."""
    base = model.transfer.base_width
    return 1.0 if base is None else model.emb_dim / base


def depth_ratio(model: config.Model) -> float:
    """Depth of the model relative to the base of model.transfer."""
    base = model.transfer.base_layers
    return 1.0 if base is None else model.num_layers / base


def residual_scale(model: config.Model) -> float:
    """Scale of the last projection of each residual branch.

    The residual stream is a sum of 2 * num_layers branches. Scaled by 1 / sqrt(2 * num_layers) each, their sum has the
    variance of one branch at any depth (Radford et al., 2019). With a base depth (model.transfer) the branches of a
    deeper model are those of the base, divided by the ratio of the depths (Dey et al., 2025).
    """
    ratio = depth_ratio(model)
    return model.init_scale * (2 * model.num_layers / ratio) ** -0.5 / ratio
