"""Gated DeltaNet (Yang et al., 2024), in the form of Qwen3-Next (2025).

Shapes: B batch, T tokens, D residual stream, M key heads, K key size, N value heads, V value size, W convolution taps,
P = W - 1 earlier tokens that the convolutions read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.gated_delta import gated_delta
from maxhydra.kernels.halo import with_previous_tokens
from maxhydra.kernels.placement import Placement
from maxhydra.layers.context import Context, kernel_errors_as_config_errors
from maxhydra.layers.interfaces import MixerOutput
from maxhydra.layers.kv_cache import Cache, CacheSpec, StateSpec
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.sharding import LogicalAxes


class ShortConvolution(nnx.Module):
    """Causal depthwise convolution: silu(sum over w of kernel[w] * x[t - W + 1 + w]), within a sequence."""

    def __init__(self, shape: tuple[int, int], axes: LogicalAxes, *, taps: int, make: ParamBuilder):
        self.kernel = make.matrix((taps,), shape, (None, *axes), std=taps**-0.5)

    def __call__(
        self, x_BTNH: jax.Array, segments_BT: jax.Array | None, tail_BPNH: jax.Array | None, place: Placement
    ) -> tuple[jax.Array, jax.Array | None]:
        """The output, and the tail of the last P tokens if one was given.

        Without a tail a token sees only its own segment. With one every row is one sequence, and padding comes before
        its first token or after the last token of this call. `place`: as of the queries, if the sequence is sharded.
        """
        kernel_WNH = self.kernel[...].astype(x_BTNH.dtype)
        before = kernel_WNH.shape[0] - 1
        if segments_BT is not None:
            x_BTNH = jnp.where((segments_BT != 0)[:, :, None, None], x_BTNH, 0)
        if tail_BPNH is not None:
            all_BSNH = jnp.concatenate([tail_BPNH.astype(x_BTNH.dtype), x_BTNH], axis=1)
            return _convolve(kernel_WNH, all_BSNH, None), last_tokens(all_BSNH, segments_BT, before).astype(
                tail_BPNH.dtype
            )
        axis, size = place.spec("length")[0], place.num_shards("length")

        def on_device(kernel_WNH: jax.Array, x_BTNH: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
            arrays = (x_BTNH, segments_BT)
            if size > 1:
                extended = jax.tree.map(lambda x: with_previous_tokens(x, before, axis, size), arrays)
            else:
                extended = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (before, 0), *[(0, 0)] * (x.ndim - 2)]), arrays)
            return _convolve(kernel_WNH, *extended)

        heads = place.spec("batch", "length", "heads")
        specs = (place.spec(None, "heads"), heads, place.spec("batch", "length"))
        run = place.shard_map(on_device, specs, heads) if size > 1 else on_device
        return run(kernel_WNH, x_BTNH, segments_BT), None


def _convolve(kernel_WNH: jax.Array, x_BSNH: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
    """silu of the convolution for the tokens behind the first W - 1, each within its segment."""
    taps, length = kernel_WNH.shape[0], x_BSNH.shape[1] - kernel_WNH.shape[0] + 1
    total_BTNH = x_BSNH[:, taps - 1 :] * kernel_WNH[-1]
    for start in reversed(range(taps - 1)):
        earlier_BTNH = x_BSNH[:, start : start + length]
        if segments_BS is not None:
            is_same_BT = segments_BS[:, start : start + length] == segments_BS[:, taps - 1 :]
            earlier_BTNH = jnp.where(is_same_BT[:, :, None, None], earlier_BTNH, 0)
        total_BTNH = total_BTNH + earlier_BTNH * kernel_WNH[start]
    return jax.nn.silu(total_BTNH)


def last_tokens(all_BSNH: jax.Array, segments_BT: jax.Array | None, count: int) -> jax.Array:
    """The last `count` tokens before the trailing padding."""
    if segments_BT is None:
        return all_BSNH[:, all_BSNH.shape[1] - count :]
    indices_1T = jnp.arange(1, segments_BT.shape[1] + 1)[None]
    end_B = jnp.max(jnp.where(segments_BT != 0, indices_1T, 0), axis=1)
    indices_BP = end_B[:, None] + jnp.arange(count)[None]
    return jnp.take_along_axis(all_BSNH, indices_BP[:, :, None, None], axis=1)


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
            norm_eps=model.norm_eps,
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
        previous = self._previous_state(ctx)
        q_BTMK, k_BTMK, v_BTNV, tails = self._heads(x_BTD, ctx, previous)
        with kernel_errors_as_config_errors():
            attended_BTNV, state_BNKV = gated_delta(
                _unit(q_BTMK) * self.spec.key_dim**-0.5,
                _unit(k_BTMK),
                v_BTNV,
                log_decay_BTN=self._log_decay(x_BTD, ctx),
                rate_BTN=jax.nn.sigmoid(_float32(self.rate(x_BTD, ctx))),
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

    def _previous_state(self, ctx: Context) -> dict[str, Any]:
        """State and tails of earlier tokens; zeros for rows that start in this call, whose slot may hold old data."""
        if ctx.cache is None:
            return {}
        is_first_BT = ctx.positions == 0
        if ctx.segments is not None:
            is_first_BT &= ctx.segments != 0
        starts_B = jnp.any(is_first_BT, axis=1)
        stored: dict[str, jax.Array] = ctx.cache.read(ctx.rows)
        return {
            name: jnp.where(starts_B.reshape(-1, *(1,) * (array.ndim - 1)), 0, array) for name, array in stored.items()
        }

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
