"""Normalization: RMSNorm (Zhang and Sennrich, 2019), LayerNorm (Ba et al., 2016)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.fused_linear import NormParams as NormParams
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.rms_norm import rms_norm
from maxhydra.kernels.rms_norm.reference import unit_rms
from maxhydra.layers.context import KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.params import Dtypes, ParamBuilder


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """The kind of norm that a model uses, resolved from the config."""

    kind: config.Norm
    eps: float
    kernel: KernelChoice
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model) -> "NormSpec":
        kernel = KernelChoice(model.kernels.rms_norm.value, model.kernels.sizes("rms_norm"))
        return cls(model.norm, model.norm_eps, kernel, Dtypes.of(model.dtypes))

    def build(self, dim: int, make: ParamBuilder) -> "Norm":
        """Build a norm over vectors of this size."""
        if self.kind is config.Norm.layer:
            return LayerNorm(dim, eps=self.eps, dtypes=self.dtypes, make=make)
        is_centered = self.kind is config.Norm.rms_plus_one
        return RMSNorm(dim, eps=self.eps, dtypes=self.dtypes, make=make, is_centered=is_centered)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 for any x: a mean of squares overflows half precision.

    A centered scale is stored minus one, so that weight decay pulls it towards one (Gemma).
    """

    def __init__(self, dim: int, *, eps: float, dtypes: Dtypes, make: ParamBuilder, is_centered: bool = False):
        self.eps, self.dtypes, self.is_centered = eps, dtypes, is_centered
        self.scale = (make.zeros if is_centered else make.ones)((dim,), ("norm",))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        return (unit_rms(x, self.eps) * self._factor).astype(self.dtypes.compute)

    @jax.named_scope("norm")
    def norm_with_residual(
        self, x: jax.Array, *, kernel: KernelChoice, place: Placement
    ) -> tuple[jax.Array, jax.Array]:
        """x and the norm of x: see the function `norm_with_residual`."""
        with kernel_errors_as_config_errors():
            return rms_norm(x, self._factor, eps=self.eps, dtype=self.dtypes.compute, **kernel._asdict(), place=place)

    @property
    def _factor(self) -> jax.Array:
        """The scale, in float32 if it is centered; otherwise in its own dtype, which kernels convert on reading."""
        scale = self.scale[...]
        return 1 + scale.astype(jnp.float32) if self.is_centered else scale

    @property
    def kernel_params(self) -> NormParams:
        """This norm as the fused_linear kernels take it."""
        return NormParams(self.scale[...], offset=float(self.is_centered), eps=self.eps)


class PlainNorm(nnx.Module):
    """RMSNorm without a scale."""

    def __init__(self, *, eps: float, dtypes: Dtypes):
        self.eps, self.dtypes = eps, dtypes

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        return unit_rms(x, self.eps).astype(self.dtypes.compute)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * scale + bias, in float32."""

    def __init__(self, dim: int, *, eps: float, dtypes: Dtypes, make: ParamBuilder, has_bias: bool = True):
        self.eps, self.dtypes = eps, dtypes
        self.scale = make.ones((dim,), ("norm",))
        self.bias = make.zeros((dim,), ("norm",)) if has_bias else None

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        x_float32 = x.astype(jnp.float32)
        unit = unit_rms(x_float32 - jnp.mean(x_float32, axis=-1, keepdims=True), self.eps)
        scaled = unit * self.scale[...].astype(jnp.float32)
        scaled = scaled if self.bias is None else scaled + self.bias[...].astype(jnp.float32)
        return scaled.astype(self.dtypes.compute)


Norm = RMSNorm | PlainNorm | LayerNorm


def norm_with_residual(
    norm: Norm | None, x: jax.Array, *, kernel: KernelChoice, place: Placement
) -> tuple[jax.Array, jax.Array]:
    """The residual stream x and norm(x), the input of a branch; x twice without a norm.

    Returning both from one operation lets an RMSNorm kernel add their two gradients in its backward pass.
    """
    if isinstance(norm, RMSNorm):
        return norm.norm_with_residual(x, kernel=kernel, place=place)
    return x, x if norm is None else norm(x)
