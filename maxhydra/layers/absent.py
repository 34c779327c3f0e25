"""Sub-layers that a layer does not have: a layer with one of them has a single residual branch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.layers.context import Context
from maxhydra.layers.interfaces import AuxOutputs, FeedForwardOutput, MixerOutput
from maxhydra.layers.kv_cache import Cache, CacheSpec, NoCache
from maxhydra.layers.params import ParamBuilder


@dataclasses.dataclass(frozen=True)
class NoMixerSpec:
    """No mixer."""

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "NoMixerSpec":
        return cls()

    def build(self, make: ParamBuilder) -> "NoMixer":
        return NoMixer()

    def forward_flops(self, seq_len: int) -> float:
        return 0.0


class NoMixer(nnx.Module):
    """Adds nothing to the residual stream."""

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        return MixerOutput(jnp.zeros_like(x_BTD), ctx.cache, {})

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        return NoCache()


@dataclasses.dataclass(frozen=True)
class NoMlpSpec:
    """No feed-forward."""

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "NoMlpSpec":
        return cls()

    def build(self, make: ParamBuilder) -> "NoMlp":
        return NoMlp()

    def forward_flops(self) -> float:
        return 0.0

    def idle_parameters(self) -> int:
        return 0

    def apply_aux_updates(self, new: Any, old: Any, aux: AuxOutputs) -> Any:
        return new


class NoMlp(nnx.Module):
    """Adds nothing to the residual stream."""

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> FeedForwardOutput:
        return FeedForwardOutput(jnp.zeros_like(x_BTD), {})
