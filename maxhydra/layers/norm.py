"""Normalisation: RMSNorm (Zhang and Sennrich, 2019), LayerNorm (Ba et al., 2016)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.fused_linear import Norm as Factors
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.rms_norm import rms_norm
from maxhydra.kernels.rms_norm.reference import unit_square
from maxhydra.layers.kernel_options import KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.params import Dtypes, ParamBuilder


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """How a model normalises."""

    kind: config.Norm
    eps: float
    wanted: KernelChoice
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model) -> "NormSpec":
        wanted = KernelChoice(model.kernels.rms_norm.value, model.kernels.sizes("rms_norm"))
        return cls(model.norm, model.norm_eps, wanted, Dtypes.of(model.dtypes))

    def build(self, dim: int, make: ParamBuilder) -> "Norm":
        """A norm over vectors of this size."""
        if self.kind is config.Norm.layer:
            return LayerNorm(dim, eps=self.eps, dtypes=self.dtypes, make=make)
        is_centred = self.kind is config.Norm.rms_plus_one
        return RMSNorm(dim, eps=self.eps, dtypes=self.dtypes, make=make, is_centred=is_centred)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 whatever x is: a mean of squares overflows half precision.

    A centred scale is kept less one: weight decay then draws it to one.
    """

    def __init__(self, dim: int, *, eps: float, dtypes: Dtypes, make: ParamBuilder, is_centred: bool = False):
        self.eps, self.dtypes, self.is_centred = eps, dtypes, is_centred
        self.scale = (make.zeros if is_centred else make.ones)((dim,), ("norm",))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        return (unit_square(x, self.eps) * self._factor).astype(self.dtypes.compute)

    @jax.named_scope("norm")
    def norm_with_residual(
        self, x: jax.Array, *, wanted: KernelChoice, place: Placement
    ) -> tuple[jax.Array, jax.Array]:
        """x to go on with, and the norm of x: see `norm_with_residual`."""
        with kernel_errors_as_config_errors():
            return rms_norm(x, self._factor, eps=self.eps, dtype=self.dtypes.compute, **wanted._asdict(), place=place)

    @property
    def _factor(self) -> jax.Array:
        """In float32 where something is added; else as it is, since a kernel widens it on the way."""
        scale = self.scale[...]
        return 1 + scale.astype(jnp.float32) if self.is_centred else scale

    @property
    def factors(self) -> Factors:
        """The same for a kernel that does it on the way to a product."""
        return Factors(self.scale[...], offset=float(self.is_centred), eps=self.eps)


class PlainNorm(nnx.Module):
    """The same without a scale."""

    def __init__(self, *, eps: float, dtypes: Dtypes):
        self.eps, self.dtypes = eps, dtypes

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        return unit_square(x, self.eps).astype(self.dtypes.compute)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * scale + bias, in float32."""

    def __init__(self, dim: int, *, eps: float, dtypes: Dtypes, make: ParamBuilder):
        self.eps, self.dtypes = eps, dtypes
        self.scale, self.bias = make.ones((dim,), ("norm",)), make.zeros((dim,), ("norm",))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        unit = unit_square(wide - jnp.mean(wide, axis=-1, keepdims=True), self.eps)
        scaled = unit * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return scaled.astype(self.dtypes.compute)


Norm = RMSNorm | PlainNorm | LayerNorm


def norm_with_residual(
    norm: Norm | None, x: jax.Array, *, wanted: KernelChoice, place: Placement
) -> tuple[jax.Array, jax.Array]:
    """A stream to go on with, and what a branch of it sees; where there is no norm, the stream.

    Both come from one place, so that in the backward pass the gradients of both meet in one kernel where there is one.
    """
    if isinstance(norm, RMSNorm):
        return norm.norm_with_residual(x, wanted=wanted, place=place)
    return x, x if norm is None else norm(x)
