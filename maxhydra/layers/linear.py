"""Linear projections: the matmul with a weight in its number format, the bias, and the LoRA update.

Every weight matrix of a layer is a `Linear`, so quantization and adapters are implemented once.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from maxhydra.config.schema import quantization as config
from maxhydra.config.schema.quantization import TRAINING_KINDS, QuantizationKind
from maxhydra.config.values import matches_any
from maxhydra.kernels.fp8_matmul import fp8_matmul, fp8_matmul_delayed
from maxhydra.kernels.int8_matmul import int8_matmul
from maxhydra.kernels.int8_weight_matmul import int8_weight_matmul
from maxhydra.kernels.matmul import Layout, project
from maxhydra.layers.context import Context
from maxhydra.layers.quant.four_bit import FourBit, FourBitParts
from maxhydra.layers.quant.int8 import Int8, concatenate_int8, quantized
from maxhydra.layers.quant.nf4 import Nf4, Nf4Parts
from maxhydra.layers.quant.training import (
    AmaxHistory,
    Matmul,
    QatMatmul,
    QuantRule,
    format_of,
    is_qat,
    merge_histories,
    round_inputs,
    rounding,
    straight_through,
    straight_through_matmul,
)

# Letters for the input and output dimensions of a matmul; more than any weight has.
INPUTS, OUTPUTS = "abcd", "wxyz"


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """A LoRA adapter, resolved from the config."""

    rank: int
    scale: float
    dropout: float
    targets: tuple[str, ...]
    over_nf4: bool
    """Whether the base kernels of all projections are quantized to NF4 (QLoRA)."""
    has_magnitude: bool = False
    """Whether the norms of the columns are trained separately (DoRA)."""
    has_start: bool = False
    """Whether a and b start at other values than 0, whose update is subtracted (PiSSA)."""
    parameters: tuple[str, ...] = ()
    """Weights other than projections with an update, as regular expressions."""
    slots: int = 0
    """Adapters that are stacked in a and b, of which every row of a batch uses its own; 0: one adapter for all."""

    @classmethod
    def of(cls, adapter: config.Adapter | None, slots: int = 0) -> "LoraSpec | None":
        """None without an adapter."""
        if adapter is None or adapter.kind is config.AdapterKind.none:
            return None
        assert adapter.rank is not None and adapter.alpha is not None
        assert adapter.dropout is not None and adapter.targets is not None
        return cls(
            rank=adapter.rank,
            scale=adapter.alpha / (math.sqrt(adapter.rank) if adapter.rank_stabilized else adapter.rank),
            dropout=adapter.dropout,
            targets=tuple(adapter.targets),
            over_nf4=adapter.kind is config.AdapterKind.qlora,
            has_magnitude=adapter.dora,
            has_start=adapter.init is config.AdapterInit.pissa,
            parameters=tuple(adapter.parameters),
            slots=slots,
        )

    def adds_to(self, name: str) -> bool:
        """Whether the projection of this name gets a LoRA update."""
        return matches_any(self.targets, name)

    def adds_to_parameter(self, name: str) -> bool:
        """Whether the weight of this name, which is not a projection, gets a LoRA update."""
        return matches_any(self.parameters, name)


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """How a model's matmuls are computed: dtype, weight layout, adapter, quantization."""

    compute: np.dtype
    layout: Layout
    is_fused: bool = True
    """Whether matmuls of a few rows may run in kernels that fuse their norm, gate or residual sum."""
    lora: LoraSpec | None = None
    formats: tuple[QuantRule, ...] = ()
    """Quantization rules, by weight name."""

    def format_of(self, name: str) -> QuantRule | None:
        """The quantization rule of the weight of this name; None if it is not quantized."""
        return format_of(self.formats, name)


def dropout(x: jax.Array, key: jax.Array | None, *, rate: float) -> jax.Array:
    """Zero a fraction `rate` of x and scale up the rest to keep the mean (Srivastava et al., 2014); x without a key."""
    if key is None or rate == 0:
        return x
    mask = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)


class Lora(nnx.Module):
    """scale * b(a(dropout(x))) of rank r (Hu et al., 2021). b starts at zero, so training starts at the base model.

    PiSSA starts with other values; their update is subtracted here instead of from the kernel, so that the kernel
    stays that of the base model.
    """

    def __init__(
        self,
        a: nnx.Param,
        b: nnx.Param,
        spec: LoraSpec,
        *,
        number: int,
        magnitude: nnx.Param | None = None,
        start: tuple[nnx.Param, nnx.Param] | None = None,
    ):
        """`number`: index of the projection in its layer, which gives it its own dropout key.

        `magnitude`: norms of the columns (DoRA). `start`: a and b at the start of training (PiSSA), which are constant.
        """
        self.a, self.b = a, b
        self.spec, self.number = spec, number
        self.magnitude = magnitude
        self.start_a: nnx.Param | None = None if start is None else start[0]
        self.start_b: nnx.Param | None = None if start is None else start[1]

    def __call__(self, x: jax.Array, ctx: Context, matmul_spec: MatmulSpec, *, inputs: int) -> jax.Array:
        if self.spec.slots:
            return self._gathered(x, ctx, matmul_spec, inputs=inputs)

        def update(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            return _matmul(_matmul(x, a, matmul_spec, inputs=inputs), b, matmul_spec, inputs=1)

        delta = update(dropout(x, ctx.key(self.number), rate=self.spec.dropout), self.a[...], self.b[...])
        if self.start_a is not None and self.start_b is not None:
            delta -= update(x, *map(jax.lax.stop_gradient, (self.start_a[...], self.start_b[...])))
        return self.spec.scale * delta

    def _gathered(self, x: jax.Array, ctx: Context, matmul_spec: MatmulSpec, *, inputs: int) -> jax.Array:
        """The update of every row by its own adapter: a [slots, *inputs, rank] and b [slots, rank, *outputs]."""
        assert ctx.adapters_B is not None and x.shape[0] == ctx.adapters_B.shape[0]
        a, b = (stack[...][ctx.adapters_B].astype(matmul_spec.compute) for stack in (self.a, self.b))
        contracted, outputs = INPUTS[:inputs], OUTPUTS[: b.ndim - 2]
        low_rank = jnp.einsum(f"B...{contracted},B{contracted}R->B...R", x, a)
        return self.spec.scale * jnp.einsum(f"B...R,BR{outputs}->B...{outputs}", low_rank, b)

    def matrix(self) -> jax.Array:
        """The update of the kernel, scale * a @ b, less its value at the start."""
        delta = jnp.tensordot(self.a[...], self.b[...], axes=1)
        if self.start_a is not None and self.start_b is not None:
            delta -= jax.lax.stop_gradient(jnp.tensordot(self.start_a[...], self.start_b[...], axes=1))
        return self.spec.scale * delta

    def column_ratio(self, kernel: jax.Array, *, inputs: int) -> jax.Array:
        """magnitude / norm of the columns of kernel + update, [*outputs]. The norm has no gradient, as in DoRA."""
        assert self.magnitude is not None
        merged = jax.lax.stop_gradient(kernel.astype(jnp.float32) + self.matrix())
        return self.magnitude[...] / column_norms(merged, inputs=inputs)


class Linear(nnx.Module):
    """x @ kernel [*inputs, *outputs], over the last dimensions of x, plus an optional bias [*outputs]."""

    def __init__(
        self,
        kernel: nnx.Param | Nf4 | Int8 | FourBit,
        lora: Lora | None,
        matmul_spec: MatmulSpec,
        *,
        name: str,
        inputs: int,
        bias: nnx.Param | None,
        history: AmaxHistory | None,
    ):
        """`name`: <layer kind>/<path in the layer>, which config targets match."""
        self.kernel, self.lora, self.bias, self.history = kernel, lora, bias, history
        self.matmul_spec, self.name, self.inputs = matmul_spec, name, inputs
        self.format = matmul_spec.format_of(name)

    def __call__(self, x: jax.Array, ctx: Context, sharding: NamedSharding | None = None) -> jax.Array:
        """`sharding`: of the kernel in the matmul, and of its gradient there; None: as the compiler chooses."""
        return self.add_lora(fused_matmul((self,), x, ctx, sharding), x, ctx)

    def matmul(self, x: jax.Array, kernel: jax.Array, ctx: Context, histories: Sequence[jax.Array]) -> jax.Array:
        """x @ kernel in this projection's number format; `histories`: amax histories of all projections in kernel."""
        rule, is_single_device = self.format, ctx.sharder.mesh.size == 1
        if histories:
            history = merge_histories(list(histories))
            return self._as_matrices(
                lambda x, kernel: fp8_matmul_delayed(is_single_device, x, kernel, history), x, kernel
            )
        if rule is not None and rule.kind is QuantizationKind.fp8:
            return self._as_matrices(partial(fp8_matmul, is_single_device), x, kernel)
        if rule is not None and rule.kind is QuantizationKind.int8:
            return self._as_matrices(partial(int8_matmul, rule.is_wide_back), x, kernel)
        if rule is not None and is_qat(rule):
            x = round_inputs(rule, x, inputs=self.inputs)
            return straight_through_matmul(self._qat_matmul(rule, is_single_device=is_single_device), x, kernel)
        return _matmul(x, kernel, self.matmul_spec, inputs=self.inputs)

    def _qat_matmul(self, rule: QuantRule, *, is_single_device: bool) -> QatMatmul:
        """The matmul as it will be computed once the kernel is quantized, with straight-through gradients."""
        plain = partial(_matmul, spec=self.matmul_spec, inputs=self.inputs)
        rounded = rounding(rule, inputs=self.inputs, name=self.name)
        if rule.kind is QuantizationKind.qat_int4:
            return QatMatmul(lambda x, kernel: plain(x, rounded(kernel)), rounded, plain)

        def int8_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
            parts = quantized(kernel, range(self.inputs))
            return int8_weight_matmul(
                x, parts.codes, parts.scales, layout=self.matmul_spec.layout, is_single_device=is_single_device
            )

        return QatMatmul(int8_matmul, rounded, plain)

    def _as_matrices(self, matmul: Matmul, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Apply a matmul of matrices to arrays with more dimensions."""
        rows, outputs = x.shape[: x.ndim - self.inputs], kernel.shape[self.inputs :]
        size = math.prod(kernel.shape[: self.inputs])
        return matmul(x.reshape(-1, size), kernel.reshape(size, -1)).reshape(*rows, *outputs)

    @property
    def is_rounded(self) -> bool:
        """Whether operands are rounded before the matmul, as in quantized training."""
        return self.format is not None and self.format.kind in TRAINING_KINDS

    @property
    def is_plain(self) -> bool:
        """Whether it is a matmul with an unquantized kernel and nothing else."""
        return isinstance(self.kernel, nnx.Param) and not any((self.format, self.lora, self.bias is not None))

    @property
    def width(self) -> int:
        """Size of the first output dimension."""
        if isinstance(self.kernel, Nf4 | FourBit):
            return self.kernel.parts.scales.shape[1]
        return (self.kernel.codes if isinstance(self.kernel, Int8) else self.kernel)[...].shape[self.inputs]

    @property
    def stored(self) -> jax.Array | Nf4Parts | FourBitParts:
        """The kernel in its storage format."""
        assert not isinstance(self.kernel, Int8)
        return self.kernel.parts if isinstance(self.kernel, Nf4 | FourBit) else self.kernel[...]

    def weight(self, stored: jax.Array | Nf4Parts | FourBitParts) -> jax.Array:
        """Dequantize or cast a stored kernel to [*inputs, *outputs] in the compute dtype."""
        if isinstance(self.kernel, Nf4):
            assert isinstance(stored, Nf4Parts)
            return self.kernel.unpacked(stored, self.matmul_spec.compute)
        if isinstance(self.kernel, FourBit):
            assert isinstance(stored, FourBitParts)
            return self.kernel.unpacked(stored, self.matmul_spec.compute)
        assert isinstance(stored, jax.Array)
        return stored.astype(self.matmul_spec.compute)

    def matrix(self, ctx: Context) -> jax.Array:
        """Kernel plus LoRA update as one array [*inputs, *outputs], for callers that use slices of it; no dropout."""
        if isinstance(self.kernel, Int8):
            kernel = self.kernel.unpacked(self.matmul_spec.compute)
        else:
            kernel = self.weight(self.stored)
        if self.format is not None and is_qat(self.format):
            kernel = straight_through(rounding(self.format, inputs=self.inputs, name=self.name), kernel)
        if self.lora is None or not ctx.is_adapted:
            return kernel
        merged = kernel + self.lora.matrix().astype(kernel.dtype)
        if self.lora.magnitude is None:
            return merged
        return merged * self.lora.column_ratio(kernel, inputs=self.inputs).astype(kernel.dtype)

    def add_lora(self, out: jax.Array, x: jax.Array, ctx: Context) -> jax.Array:
        """out = x @ kernel, plus the LoRA update if an adapter is active."""
        if self.lora is None or not ctx.is_adapted or (self.lora.spec.slots and ctx.adapters_B is None):
            return out
        update = self.lora(x, ctx, self.matmul_spec, inputs=self.inputs)
        if self.lora.magnitude is None:
            return out + update
        kernel = self.kernel.unpacked(jnp.float32) if isinstance(self.kernel, Int8) else self.weight(self.stored)
        ratio = self.lora.column_ratio(kernel, inputs=self.inputs).astype(out.dtype)
        bias = jnp.zeros((), out.dtype) if self.bias is None else self.bias[...].astype(out.dtype)
        return ratio * (out - bias + update) + bias


def column_norms(kernel: jax.Array, *, inputs: int) -> jax.Array:
    """Norms [*outputs] of the columns of a kernel [*inputs, *outputs], over all inputs of an output."""
    return jnp.sqrt(jnp.sum(jnp.square(kernel), axis=tuple(range(inputs))))


def project_together(projections: Sequence[Linear], x: jax.Array, ctx: Context) -> list[jax.Array]:
    """Several projections of the same x by one fused matmul: x is read once, its gradient written once.

    They may differ in the first output dimension. Projections in different number formats are computed separately.
    """
    if not are_alike(projections):
        return [projection(x, ctx) for projection in projections]
    axis = projections[0].inputs
    starts = np.cumsum([projection.width for projection in projections])[:-1]
    outputs = jnp.split(fused_matmul(projections, x, ctx), starts, axis=x.ndim - axis)
    return [projection.add_lora(out, x, ctx) for projection, out in zip(projections, outputs, strict=True)]


def are_alike(projections: Sequence[Linear]) -> bool:
    """Whether they store and multiply their kernels in the same number format."""
    return len({(projection.format, type(projection.kernel)) for projection in projections}) == 1


def are_bare(projections: Sequence[Linear]) -> bool:
    """Whether one fused matmul computes them completely: same number format, no LoRA."""
    return are_alike(projections) and all(projection.lora is None for projection in projections)


def fused_matmul(
    projections: Sequence[Linear], x: jax.Array, ctx: Context, sharding: NamedSharding | None = None
) -> jax.Array:
    """x @ kernels of the projections, concatenated along their first output dimension, without LoRA updates.

    All or none have a bias. NF4 kernels are dequantized again in the backward pass: saved for it, they would take the
    memory that quantization saves.
    """
    first = projections[0]
    packed = [projection.kernel.parts for projection in projections if isinstance(projection.kernel, Int8)]
    if packed:
        fused, is_single_device = concatenate_int8(packed), ctx.sharder.mesh.size == 1
        out = int8_weight_matmul(
            x, fused.codes, fused.scales, layout=first.matmul_spec.layout, is_single_device=is_single_device
        )
        return _with_biases(projections, out)

    histories = [projection.history[...] for projection in projections if projection.history is not None]

    def matmul(x: jax.Array, stored: list[Any]) -> jax.Array:
        kernels = [projection.weight(kernel) for projection, kernel in zip(projections, stored, strict=True)]
        fused = kernels[0] if len(kernels) == 1 else jnp.concatenate(kernels, axis=first.inputs)
        if sharding is not None:
            fused = jax.lax.with_sharding_constraint(fused.astype(first.matmul_spec.compute), sharding)
        return first.matmul(x, fused, ctx, histories)

    is_nf4 = any(isinstance(projection.kernel, Nf4) for projection in projections)
    out = (jax.checkpoint(matmul) if is_nf4 else matmul)(x, [projection.stored for projection in projections])
    return _with_biases(projections, out)


def _with_biases(projections: Sequence[Linear], out: jax.Array) -> jax.Array:
    biases = [projection.bias[...].astype(out.dtype) for projection in projections if projection.bias is not None]
    assert len(biases) in (0, len(projections))
    return out + jnp.concatenate(biases) if biases else out


def _matmul(x: jax.Array, kernel: jax.Array, spec: MatmulSpec, *, inputs: int) -> jax.Array:
    contracted, outputs = INPUTS[:inputs], OUTPUTS[: kernel.ndim - inputs]
    equation = f"...{contracted},{contracted}{outputs}->...{outputs}"
    return project(equation, x, kernel.astype(spec.compute), layout=spec.layout)
