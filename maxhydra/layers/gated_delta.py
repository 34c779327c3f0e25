"""Gated DeltaNet (Yang et al., 2024), in the form of Qwen3-Next (2025).

Shapes: B batch, T tokens, D residual stream, M key heads, K key size, N value heads, V value size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.gated_delta import gated_delta
from maxhydra.layers.context import Context, kernel_errors_as_config_errors
from maxhydra.layers.interfaces import MixerOutput
from maxhydra.layers.kv_cache import Cache, CacheSpec, StateSpec
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.short_convolution import ShortConvolution, stored_states

# Added to the squared L2 norm of queries and keys before its inverse square root.
LENGTH_EPS = 1e-6
# Range of the initial decay rates, in nats per token at a step of one.
SLOWEST, FASTEST = 0.01, 16.0


@dataclasses.dataclass(frozen=True)
class DeltaSpec:
    """Sizes of Gated DeltaNet in one layer kind, resolved from the config."""

    emb_dim: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    max_rate: float
    norm_eps: float
    backend: str
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "DeltaSpec":
        section = kind.delta
        return cls(
            emb_dim=model.emb_dim,
            num_key_heads=section.num_key_heads or model.num_kv_heads,
            num_value_heads=section.num_value_heads or model.num_heads,
            key_dim=section.key_dim or model.head_dim,
            value_dim=section.value_dim or model.head_dim,
            taps=section.taps,
            max_rate=section.max_rate,
            norm_eps=section.norm_eps or model.norm_eps,
            backend=model.kernels.delta.value,
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )

    def build(self, make: ParamBuilder) -> "Delta":
        return Delta(self, make)

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token, independent of length: projections, convolutions, state read, update and query."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        projections = self.emb_dim * (2 * keys + 3 * values + 2 * self.num_value_heads)
        return 2.0 * (projections + self.taps * (2 * keys + values)) + 6.0 * values * self.key_dim


class Delta(nnx.Module):
    """out(norm(delta_rule(query(x), key(x), value(x), decay(x), rate(x))) * silu(gate(x)))."""

    def __init__(self, spec: DeltaSpec, make: ParamBuilder):
        self.spec = spec
        D, scale = spec.emb_dim, spec.init_scale
        keys, values = (spec.num_key_heads, spec.key_dim), (spec.num_value_heads, spec.value_dim)
        of_keys, of_values = ("kv_heads", "head_dim"), ("heads", "head_dim")
        self.query = make.projection("query", (D,), keys, ("embed", *of_keys), scale=scale)
        self.key = make.projection("key", (D,), keys, ("embed", *of_keys), scale=scale)
        self.value = make.projection("value", (D,), values, ("embed", *of_values), scale=scale)
        self.gate = make.projection("gate", (D,), values, ("embed", *of_values), scale=scale)
        self.rate = make.projection("rate", (D,), values[:1], ("embed", "heads"), scale=scale)
        self.decay = make.projection("decay", (D,), values[:1], ("embed", "heads"), scale=scale)
        self.out = make.projection("out", values, (D,), (*of_values, "embed"), scale=spec.out_scale)
        self.query_filter = ShortConvolution(keys, of_keys, taps=spec.taps, make=make)
        self.key_filter = ShortConvolution(keys, of_keys, taps=spec.taps, make=make)
        self.value_filter = ShortConvolution(values, of_values, taps=spec.taps, make=make)
        self.log_speed = make.random(values[:1], ("heads",), _log_speeds)
        self.step_bias = make.ones(values[:1], ("heads",))
        self.norm = RMSNorm(spec.value_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)

    @jax.named_scope("delta")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        previous = stored_states(ctx)
        q_BTMK, k_BTMK, v_BTNV, tails = self._heads(x_BTD, ctx, previous)
        with kernel_errors_as_config_errors():
            attended_BTNV, state_BNKV = gated_delta(
                _unit(q_BTMK) * self.spec.key_dim**-0.5,
                _unit(k_BTMK),
                v_BTNV,
                log_decay_BTN=self._log_decay(x_BTD, ctx),
                rate_BTN=self.spec.max_rate * jax.nn.sigmoid(_float32(self.rate(x_BTD, ctx))),
                state_BNKV=previous.get("state"),
                segments_BT=ctx.segments,
                backend=self.spec.backend,
                place=ctx.place,
            )
        gate_BTNV = ctx.constrain(self.gate(x_BTD, ctx), "act_batch", "act_length", "act_heads", None)
        gated_BTNV = _float32(self.norm(attended_BTNV)) * jax.nn.silu(_float32(gate_BTNV))
        gated_BTNV = gated_BTNV.astype(self.spec.dtypes.compute)
        gated_BTNV = ctx.constrain(gated_BTNV, "act_batch", "act_length", "act_heads", None)
        out_BTD = self.out(checkpoint_name(gated_BTNV, "context"), ctx)
        out_BTD = ctx.to_stream(out_BTD)
        cache = None if ctx.cache is None else ctx.cache.write({"state": state_BNKV, **tails}, ctx.rows)
        return MixerOutput(checkpoint_name(out_BTD, "attention_out"), cache, {})

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        """The state, in float32 because its rounding errors accumulate, and the tails of the convolutions."""
        spec, before = self.spec, self.spec.taps - 1
        state = StateSpec((spec.num_value_heads, spec.key_dim, spec.value_dim), jnp.float32, ("act_heads", None, None))
        of_keys = StateSpec(
            (before, spec.num_key_heads, spec.key_dim), spec.dtypes.compute, (None, "act_kv_heads", None)
        )
        of_values = StateSpec(
            (before, spec.num_value_heads, spec.value_dim), spec.dtypes.compute, (None, "act_heads", None)
        )
        return cache_spec.states(layers, {"state": state, "query": of_keys, "key": of_keys, "value": of_values})

    def _heads(
        self, x_BTD: jax.Array, ctx: Context, previous: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array | None]]:
        """Queries, keys and values after their convolutions, and the new tails."""
        branches = {
            "query": (self.query, self.query_filter, "act_kv_heads"),
            "key": (self.key, self.key_filter, "act_kv_heads"),
            "value": (self.value, self.value_filter, "act_heads"),
        }
        heads: dict[str, jax.Array] = {}
        tails: dict[str, jax.Array | None] = {}
        for name, (projection, convolution, axis) in branches.items():
            projected = checkpoint_name(
                ctx.constrain(projection(x_BTD, ctx), "act_batch", "act_length", axis, None), name
            )
            place = dataclasses.replace(ctx.place, heads=ctx.place.kv_heads) if axis == "act_kv_heads" else ctx.place
            heads[name], tails[name] = convolution(projected, ctx.segments, previous.get(name), place)
        return heads["query"], heads["key"], heads["value"], tails

    def _log_decay(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """-speed * softplus(step), after Mamba (Gu and Dao, 2023)."""
        step_BTN = jax.nn.softplus(_float32(self.decay(x_BTD, ctx)) + _float32(self.step_bias[...]))
        return -jnp.exp(_float32(self.log_speed[...])) * step_BTN


def _log_speeds(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, SLOWEST, FASTEST))


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _unit(x: jax.Array) -> jax.Array:
    """Heads scaled to unit L2 norm, in float32."""
    x = _float32(x)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + LENGTH_EPS)
