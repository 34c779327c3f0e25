"""Projections whose inputs and outputs are clipped to bounds, which are loaded with the weights and not trained.

E inputs, F outputs or hidden units of a feed-forward.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.layers.context import Context
from maxhydra.layers.interfaces import FeedForwardOutput
from maxhydra.layers.linear import Linear
from maxhydra.layers.mlp import Mlp, MlpSpec, apply_activation, gated
from maxhydra.layers.params import ParamBuilder
from maxhydra.sharding import LogicalAxes

# Bounds of new models, which no activation reaches. Finite, so that averages of weights stay finite.
UNREACHED = 2.0**16
# Paths of the bounds, for the optimizer.
BOUNDS = "/bounds/"


class ClippedLinear(nnx.Module):
    """clip(linear(clip(x)))."""

    def __init__(self, linear: Linear, make: ParamBuilder):
        self.linear = linear
        limits = {"input_min": -UNREACHED, "input_max": UNREACHED, "output_min": -UNREACHED, "output_max": UNREACHED}
        self.bounds = nnx.Dict({name: make.full((), (), limit) for name, limit in limits.items()})

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        return self._clip(self.linear(self._clip(x, "input"), ctx), "output")

    def _clip(self, x: jax.Array, name: str) -> jax.Array:
        low, high = (self.bounds[f"{name}_{end}"][...].astype(x.dtype) for end in ("min", "max"))
        return jnp.clip(x, low, high)


def build_projection(
    make: ParamBuilder,
    name: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    axes: LogicalAxes,
    *,
    scale: float,
    has_bias: bool,
    is_clipped: bool,
) -> Linear | ClippedLinear:
    """A projection, with bounds if it is clipped."""
    linear = make.projection(name, inputs, outputs, axes, scale=scale, has_bias=has_bias)
    return ClippedLinear(linear, make) if is_clipped else linear


class ClippedMlp(nnx.Module):
    """The feed-forward of layers/mlp.py, of clipped projections without bias."""

    def __init__(self, spec: MlpSpec, make: ParamBuilder):
        self.spec = spec
        E, F = spec.emb_dim, spec.dim
        inner = partial(build_projection, make, has_bias=False, is_clipped=True)
        axes = ("embed", "mlp")
        self.gate = inner("gate", (E,), (F,), axes, scale=spec.init_scale) if spec.is_gated else None
        self.up = inner("up", (E,), (F,), axes, scale=spec.init_scale)
        self.down = inner("down", (F,), (E,), axes[::-1], scale=spec.out_scale)

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array, ctx: Context) -> FeedForwardOutput:
        up, activation = self.up(x, ctx), self.spec.activation
        hidden = apply_activation(activation, up) if self.gate is None else gated(activation, self.gate(x, ctx), up)
        return FeedForwardOutput(self.down(hidden, ctx), {})


def build_mlp(spec: MlpSpec, make: ParamBuilder, *, is_clipped: bool) -> Mlp | ClippedMlp:
    """A feed-forward, of clipped projections if `is_clipped`."""
    return ClippedMlp(spec, make) if is_clipped else Mlp(spec, make)
