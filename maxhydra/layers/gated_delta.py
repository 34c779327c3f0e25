"""Gated DeltaNet (Yang et al., 2024), in the form of Qwen3-Next (2025).

Shapes: B batch, T tokens, D residual stream, M key heads, K key size, N value heads, V value size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.kernels.gated_delta import by_channel, gated_delta
from maxhydra.layers.context import Context, kernel_errors_as_config_errors
from maxhydra.layers.interfaces import MixerOutput
from maxhydra.layers.kv_cache import Cache, CacheSpec, StateSpec
from maxhydra.layers.linear import Linear
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.short_convolution import ShortConvolution, stored_states
from maxhydra.sharding import LogicalAxes

# Added to the squared L2 norm of queries and keys before its inverse square root.
LENGTH_EPS = 1e-6
GATES = {config.DeltaGate.silu: jax.nn.silu, config.DeltaGate.sigmoid: jax.nn.sigmoid}
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
    decay_rank: int | None
    """Rank of the projection to a decay per channel; None for one per head."""
    gate: config.DeltaGate
    gate_rank: int | None
    backend: str
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "DeltaSpec":
        section, backend = kind.delta, model.kernels.delta
        if section.decay_rank is not None and backend not in (config.DeltaBackend.auto, config.DeltaBackend.chunked):
            reason = "does not support a decay per channel (delta.decay_rank)"
            raise ConfigError(Problem("model.kernels.delta", reason, value=backend.value, accepted="auto, chunked"))
        return cls(
            emb_dim=model.emb_dim,
            num_key_heads=section.num_key_heads or model.num_kv_heads,
            num_value_heads=section.num_value_heads or model.num_heads,
            key_dim=section.key_dim or model.head_dim,
            value_dim=section.value_dim or model.head_dim,
            taps=section.taps,
            max_rate=section.max_rate,
            norm_eps=section.norm_eps or model.norm_eps,
            decay_rank=section.decay_rank,
            gate=section.gate,
            gate_rank=section.gate_rank,
            backend=backend.value,
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )

    def build(self, make: ParamBuilder) -> "Delta":
        return Delta(self, make)

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token, independent of length: projections, convolutions, state read, update and query."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        projections = self.emb_dim * (2 * keys + 2 * values + self.num_value_heads)
        gate = self.emb_dim * values if self.gate_rank is None else self.gate_rank * (self.emb_dim + values)
        decay, channels = self.emb_dim * self.num_value_heads, self.num_value_heads * self.key_dim
        decay = decay if self.decay_rank is None else self.decay_rank * (self.emb_dim + channels)
        projections += gate + decay
        return 2.0 * (projections + self.taps * (2 * keys + values)) + 6.0 * values * self.key_dim


class Delta(nnx.Module):
    """out(norm(delta_rule(query(x), key(x), value(x), decay(x), rate(x))) * silu(gate(x)))."""

    def __init__(self, spec: DeltaSpec, make: ParamBuilder):
        self.spec = spec
        D, scale = spec.emb_dim, spec.init_scale
        keys, values = (spec.num_key_heads, spec.key_dim), (spec.num_value_heads, spec.value_dim)
        of_keys, of_values = ("kv_heads", "head_dim"), ("heads", "head_dim")

        def project(
            name: str, outputs: tuple[int, ...], axes: LogicalAxes, rank: int | None = None
        ) -> Linear | LowRank:
            if rank is None:
                return make.projection(name, (D,), outputs, ("embed", *axes), scale=scale)
            down = make.below(name).projection("down", (D,), (rank,), ("embed", None), scale=scale)
            return LowRank(down, make.below(name).projection("up", (rank,), outputs, (None, *axes), scale=scale))

        self.query = project("query", keys, of_keys)
        self.key = project("key", keys, of_keys)
        self.value = project("value", values, of_values)
        self.gate = project("gate", values, of_values, spec.gate_rank)
        self.rate = project("rate", values[:1], of_values[:1])
        channels = values[:1] if spec.decay_rank is None else (spec.num_value_heads, spec.key_dim)
        of_channels = of_values[: len(channels)]
        self.decay = project("decay", channels, of_channels, spec.decay_rank)
        self.out = make.projection("out", values, (D,), (*of_values, "embed"), scale=spec.out_scale)
        self.query_filter = ShortConvolution(keys, of_keys, taps=spec.taps, make=make)
        self.key_filter = ShortConvolution(keys, of_keys, taps=spec.taps, make=make)
        self.value_filter = ShortConvolution(values, of_values, taps=spec.taps, make=make)
        self.log_speed = make.random(values[:1], ("heads",), _log_speeds)
        self.step_bias = make.ones(channels, of_channels)
        self.norm = RMSNorm(spec.value_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)

    @jax.named_scope("delta")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        previous = stored_states(ctx)
        q_BTMK, k_BTMK, v_BTNV, tails = self._heads(x_BTD, ctx, previous)
        attended_BTNV, state_BNKV = self._mix(x_BTD, ctx, q_BTMK, k_BTMK, v_BTNV, previous.get("state"))
        gate_BTNV = ctx.constrain(self.gate(x_BTD, ctx), "act_batch", "act_length", "act_heads", None)
        gated_BTNV = _float32(self.norm(attended_BTNV)) * GATES[self.spec.gate](_float32(gate_BTNV))
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

    def _mix(
        self,
        x_BTD: jax.Array,
        ctx: Context,
        q_BTMK: jax.Array,
        k_BTMK: jax.Array,
        v_BTNV: jax.Array,
        state_BNKV: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Outputs of the heads by the delta rule, and the state after the last token."""
        q_BTMK, k_BTMK = _unit(q_BTMK) * self.spec.key_dim**-0.5, _unit(k_BTMK)
        log_decay = self._log_decay(x_BTD, ctx)
        rate_BTN = self.spec.max_rate * jax.nn.sigmoid(_float32(self.rate(x_BTD, ctx)))
        if self.spec.decay_rank is not None:
            repeats = self.spec.num_value_heads // self.spec.num_key_heads
            heads = (jnp.repeat(q_BTMK, repeats, axis=2), jnp.repeat(k_BTMK, repeats, axis=2), _float32(v_BTNV))
            # Gathered along the length: the rule passes through all tokens of a sequence.
            q, k, v, log_decay = (ctx.constrain(x, "act_batch", None, "act_heads", None) for x in (*heads, log_decay))
            tokens = by_channel.Tokens(q, k, v, log_decay, ctx.constrain(rate_BTN, "act_batch", None, "act_heads"))
            return by_channel.gated_delta_by_channel(tokens, state_BNKV=state_BNKV, segments_BT=ctx.segments)
        with kernel_errors_as_config_errors():
            return gated_delta(
                q_BTMK,
                k_BTMK,
                v_BTNV,
                log_decay_BTN=log_decay,
                rate_BTN=rate_BTN,
                state_BNKV=state_BNKV,
                segments_BT=ctx.segments,
                backend=self.spec.backend,
                place=ctx.place,
            )

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
        """-speed * softplus(step), after Mamba (Gu and Dao, 2023): [B, T, N], or per channel [B, T, N, K]."""
        step = jax.nn.softplus(_float32(self.decay(x_BTD, ctx)) + _float32(self.step_bias[...]))
        speed_N = jnp.exp(_float32(self.log_speed[...]))
        return -(speed_N if self.spec.decay_rank is None else speed_N[:, None]) * step


class LowRank(nnx.Module):
    """up(down(x))."""

    def __init__(self, down: Linear, up: Linear):
        self.down, self.up = down, up

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        return self.up(self.down(x_BTD, ctx), ctx)


def _log_speeds(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, SLOWEST, FASTEST))


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _unit(x: jax.Array) -> jax.Array:
    """Heads scaled to unit L2 norm, in float32."""
    x = _float32(x)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + LENGTH_EPS)
