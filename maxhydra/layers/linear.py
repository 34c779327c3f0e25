"""Linear maps of activations: the product with a weight, and what an adapter adds to it.

Every weight of a layer that multiplies is one of these, so that there is one place where its product is made.
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

from maxhydra.config.regex import matches
from maxhydra.config.schema import adapter as config
from maxhydra.config.schema.quantization import TO_TRAIN, QuantizationKind
from maxhydra.kernels.fp8_matmul import delayed_product, float8_product
from maxhydra.kernels.int8_matmul import integer_product
from maxhydra.kernels.int8_weight_matmul import int8_product
from maxhydra.kernels.matmul import Layout, projected
from maxhydra.layers.context import Context
from maxhydra.layers.dropout import dropout
from maxhydra.layers.quant.amax_history import AmaxHistory, shared
from maxhydra.layers.quant.int4 import Int4, Int4Parts
from maxhydra.layers.quant.int8 import Int8, quantized, side_by_side
from maxhydra.layers.quant.nf4 import Nf4, Nf4Parts
from maxhydra.layers.quant.qat import Product, QatMatmul, entering, is_trained_for, rounding, straight, straight_product
from maxhydra.layers.quant.rules import QuantRule, format_of

# Letters for the dimensions of a product; more than any weight has.
INPUTS, OUTPUTS = "abcd", "wxyz"


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """A low-rank addition, resolved."""

    rank: int
    scale: float
    dropout: float
    targets: tuple[str, ...]
    over_nf4: bool
    """Whether the kernels beneath are kept in four bits, those of all projections."""

    @classmethod
    def of(cls, adapter: config.Adapter | None) -> "LoraSpec | None":
        """None where nothing is added."""
        if adapter is None or adapter.kind is config.AdapterKind.none:
            return None
        assert adapter.rank is not None and adapter.alpha is not None
        assert adapter.dropout is not None and adapter.targets is not None
        return cls(
            rank=adapter.rank,
            scale=adapter.alpha / adapter.rank,
            dropout=adapter.dropout,
            targets=tuple(adapter.targets),
            over_nf4=adapter.kind is config.AdapterKind.qlora,
        )

    def adds_to(self, name: str) -> bool:
        """Whether the projection of this name gets one."""
        return matches(self.targets, name)


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """How the products of a model are made."""

    compute: np.dtype
    layout: Layout
    is_fused: bool = True
    """Whether what stands around products of a few rows may be done on their way, where a kernel can."""
    lora: LoraSpec | None = None
    formats: tuple[QuantRule, ...] = ()
    """Those of weights that are kept or multiplied in fewer bits."""

    def format_of(self, name: str) -> QuantRule | None:
        """That of the weight of this name."""
        return format_of(self.formats, name)


class Lora(nnx.Module):
    """scale * b(a(dropout(x))) of rank r (Hu et al., 2021). b begins at zero, so that training begins at the model."""

    def __init__(self, a: nnx.Param, b: nnx.Param, spec: LoraSpec, *, number: int):
        """`number`: that of the projection in its layer, which tells its dropout from that of others."""
        self.a, self.b = a, b
        self.spec, self.number = spec, number

    def __call__(self, x: jax.Array, ctx: Context, product: MatmulSpec, *, inputs: int) -> jax.Array:
        kept = dropout(x, ctx.key(self.number), rate=self.spec.dropout)
        narrow = _product(kept, self.a[...], product, inputs=inputs)
        return self.spec.scale * _product(narrow, self.b[...], product, inputs=1)

    def matrix(self) -> jax.Array:
        """What it adds to the kernel."""
        return self.spec.scale * jnp.tensordot(self.a[...], self.b[...], axes=1)


class Linear(nnx.Module):
    """x times the kernel [*inputs, *outputs], over the last dimensions of x, plus a bias [*outputs] if it has one."""

    def __init__(
        self,
        kernel: nnx.Param | Nf4 | Int8 | Int4,
        lora: Lora | None,
        product: MatmulSpec,
        *,
        name: str,
        inputs: int,
        bias: nnx.Param | None,
        history: AmaxHistory | None,
    ):
        """`name`: <layer kind>/<path in the layer>, by which configs choose among projections."""
        self.kernel, self.lora, self.bias, self.history = kernel, lora, bias, history
        self.product, self.name, self.inputs = product, name, inputs
        self.format = product.format_of(name)

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        return self.added(joined((self,), x, ctx), x, ctx)

    def times(self, x: jax.Array, kernel: jax.Array, ctx: Context, histories: Sequence[jax.Array]) -> jax.Array:
        """x times a kernel, in this projection's number format; `histories`: those of all whose kernels it holds."""
        form, is_alone = self.format, ctx.sharder.mesh.size == 1
        if histories:
            history = shared(list(histories))
            return self._as_matrices(lambda x, kernel: delayed_product(is_alone, x, kernel, history), x, kernel)
        if form is not None and form.kind is QuantizationKind.fp8:
            return self._as_matrices(partial(float8_product, is_alone), x, kernel)
        if form is not None and form.kind is QuantizationKind.int8:
            return self._as_matrices(partial(integer_product, form.is_wide_back), x, kernel)
        if form is not None and is_trained_for(form):
            x = entering(form, x, inputs=self.inputs)
            return straight_product(self._way(form, is_alone=is_alone), x, kernel)
        return _product(x, kernel, self.product, inputs=self.inputs)

    def _way(self, form: QuantRule, *, is_alone: bool) -> QatMatmul:
        """How the kernel will be used after it was trained for its format."""
        plain = partial(_product, spec=self.product, inputs=self.inputs)
        rounded = rounding(form, inputs=self.inputs, name=self.name)
        if form.kind is QuantizationKind.qat_int4:
            return QatMatmul(lambda x, kernel: plain(x, rounded(kernel)), rounded, plain)

        def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
            parts = quantized(kernel, range(self.inputs))
            return int8_product(x, parts.codes, parts.scales, layout=self.product.layout, is_alone=is_alone)

        return QatMatmul(product, rounded, plain)

    def _as_matrices(self, product: Product, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """A product of matrices, of arrays with more dimensions."""
        rows, outputs = x.shape[: x.ndim - self.inputs], kernel.shape[self.inputs :]
        size = math.prod(kernel.shape[: self.inputs])
        return product(x.reshape(-1, size), kernel.reshape(size, -1)).reshape(*rows, *outputs)

    @property
    def is_rounded(self) -> bool:
        """Whether operands are rounded on their way into the product, as training in fewer bits does."""
        return self.format is not None and self.format.kind in TO_TRAIN

    @property
    def width(self) -> int:
        """The first dimension of the outputs."""
        if isinstance(self.kernel, Nf4 | Int4):
            return self.kernel.parts.scales.shape[1]
        return (self.kernel.codes if isinstance(self.kernel, Int8) else self.kernel)[...].shape[self.inputs]

    @property
    def kept(self) -> jax.Array | Nf4Parts | Int4Parts:
        """The kernel as it is kept."""
        assert not isinstance(self.kernel, Int8)
        return self.kernel.parts if isinstance(self.kernel, Nf4 | Int4) else self.kernel[...]

    def weight(self, kept: jax.Array | Nf4Parts | Int4Parts) -> jax.Array:
        """A kernel as it is kept -> [*inputs, *outputs] in the compute format. The one place where that is made."""
        if isinstance(self.kernel, Nf4):
            assert isinstance(kept, Nf4Parts)
            return self.kernel.unpacked(kept, self.product.compute)
        if isinstance(self.kernel, Int4):
            assert isinstance(kept, Int4Parts)
            return self.kernel.unpacked(kept, self.product.compute)
        assert isinstance(kept, jax.Array)
        return kept.astype(self.product.compute)

    def matrix(self, ctx: Context) -> jax.Array:
        """The whole map as an array [*inputs, *outputs], for those who multiply by parts of it; no dropout."""
        if isinstance(self.kernel, Int8):
            whole = self.kernel.unpacked(self.product.compute)
        else:
            whole = self.weight(self.kept)
        if self.format is not None and is_trained_for(self.format):
            whole = straight(rounding(self.format, inputs=self.inputs, name=self.name), whole)
        if self.lora is None or not ctx.is_adapted:
            return whole
        return whole + self.lora.matrix().astype(whole.dtype)

    def added(self, out: jax.Array, x: jax.Array, ctx: Context) -> jax.Array:
        """A product of x with the kernel, with what the adapter adds to it."""
        if self.lora is None or not ctx.is_adapted:
            return out
        return out + self.lora(x, ctx, self.product, inputs=self.inputs)


def together(projections: Sequence[Linear], x: jax.Array, ctx: Context) -> list[jax.Array]:
    """What several projections make of the same x, by one product: x is read once, its gradient written once.

    They may differ in the first dimension of their outputs. Different number formats make products of their own.
    """
    if not are_alike(projections):
        return [projection(x, ctx) for projection in projections]
    axis = projections[0].inputs
    starts = np.cumsum([projection.width for projection in projections])[:-1]
    parts = jnp.split(joined(projections, x, ctx), starts, axis=x.ndim - axis)
    return [projection.added(part, x, ctx) for projection, part in zip(projections, parts, strict=True)]


def are_alike(projections: Sequence[Linear]) -> bool:
    """Whether they keep their kernels and make their products in the same number format."""
    return len({(projection.format, type(projection.kernel)) for projection in projections}) == 1


def are_bare(projections: Sequence[Linear]) -> bool:
    """Whether their products can be one, and nothing is added to any of them."""
    return are_alike(projections) and all(projection.lora is None for projection in projections)


def joined(projections: Sequence[Linear], x: jax.Array, ctx: Context) -> jax.Array:
    """x times the kernels of projections, side by side in the first dimension of their outputs.

    All or none have a bias. Kernels in four bits are unpacked anew in the backward pass: kept until then, they would
    take all that was saved.
    """
    first = projections[0]
    packed = [projection.kernel.parts for projection in projections if isinstance(projection.kernel, Int8)]
    if packed:
        whole, is_alone = side_by_side(packed), ctx.sharder.mesh.size == 1
        out = int8_product(x, whole.codes, whole.scales, layout=first.product.layout, is_alone=is_alone)
        return _with_biases(projections, out)

    histories = [projection.history[...] for projection in projections if projection.history is not None]

    def product(x: jax.Array, kept: list[Any]) -> jax.Array:
        kernels = [projection.weight(one) for projection, one in zip(projections, kept, strict=True)]
        whole = kernels[0] if len(kernels) == 1 else jnp.concatenate(kernels, axis=first.inputs)
        return first.times(x, whole, ctx, histories)

    is_packed = any(isinstance(projection.kernel, Nf4) for projection in projections)
    out = (jax.checkpoint(product) if is_packed else product)(x, [projection.kept for projection in projections])
    return _with_biases(projections, out)


def _with_biases(projections: Sequence[Linear], out: jax.Array) -> jax.Array:
    biases = [projection.bias[...].astype(out.dtype) for projection in projections if projection.bias is not None]
    assert len(biases) in (0, len(projections))
    return out + jnp.concatenate(biases) if biases else out


def _product(x: jax.Array, kernel: jax.Array, spec: MatmulSpec, *, inputs: int) -> jax.Array:
    contracted, left = INPUTS[:inputs], OUTPUTS[: kernel.ndim - inputs]
    equation = f"...{contracted},{contracted}{left}->...{left}"
    return projected(equation, x, kernel.astype(spec.compute), layout=spec.layout)
