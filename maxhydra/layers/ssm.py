"""State space mixer with a scalar decay per head: Mamba-2 (Dao and Gu, 2024).

Per head, a state of S x P numbers decays and adds the outer product of key and value; the query reads it:

    state_t = exp(-speed * step_t) state_{t-1} + key_t (step_t value_t)^T,   out_t = state_t^T query_t + skip * value_t

Training and prefill compute it by chunks (state space duality): as attention with decay within a chunk, and by a
recurrence of states between chunks. A decode step applies the recurrence once.

Shapes: B batch, T tokens, D residual stream, G groups of heads that share queries and keys, R heads of a group,
N = G * R heads, P head size, S state size; C chunks, I and J tokens of a chunk.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.kernels.gated_delta.chunked import CHUNK, decays, into_chunks, tokens_last
from maxhydra.kernels.gated_delta.spec import segment_starts
from maxhydra.kernels.rms_norm.reference import unit_rms
from maxhydra.layers.context import Context
from maxhydra.layers.interfaces import MixerOutput
from maxhydra.layers.kv_cache import Cache, CacheSpec, StateSpec
from maxhydra.layers.linear import Linear
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.short_convolution import ShortConvolution, stored_states

# Range of the initial decay rates, in nats per token at a step of one, and of the initial steps.
SLOWEST, FASTEST = 1.0, 16.0
SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1


@dataclasses.dataclass(frozen=True)
class SsmSpec:
    """Sizes of the state space mixer in one layer kind, resolved from the config."""

    emb_dim: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    taps: int
    has_filter_bias: bool
    has_bias: bool
    min_step: float
    norm_eps: float
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "SsmSpec":
        section = kind.ssm
        num_heads = section.num_heads or model.num_heads
        if num_heads % section.num_groups:
            reason = f"does not divide the {num_heads} heads of the mixer"
            raise ConfigError(Problem("model.kinds.*.ssm.num_groups", reason, section.num_groups, "a divisor of them"))
        return cls(
            emb_dim=model.emb_dim,
            num_heads=num_heads,
            head_dim=section.head_dim or model.head_dim,
            num_groups=section.num_groups,
            state_dim=section.state_dim,
            taps=section.taps,
            has_filter_bias=section.filter_bias,
            has_bias=section.bias,
            min_step=section.min_step,
            norm_eps=model.norm_eps,
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )

    def build(self, make: ParamBuilder) -> "Ssm":
        return Ssm(self, make)

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token, independent of length: projections, convolutions, state update and query."""
        values, keys = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        projections = self.emb_dim * (3 * values + 2 * keys + self.num_heads)
        return 2.0 * (projections + self.taps * (values + 2 * keys)) + 4.0 * values * self.state_dim


class Ssm(nnx.Module):
    """out(norm(state_space(query(x), key(x), value(x), step(x)) * silu(gate(x)))), the norm over a group of heads."""

    def __init__(self, spec: SsmSpec, make: ParamBuilder):
        self.spec = spec
        heads, keys = (spec.num_heads, spec.head_dim), (spec.num_groups, spec.state_dim)
        # One group is shared by all heads, so every device has it.
        of_heads, of_keys = ("heads", "head_dim"), (None if spec.num_groups == 1 else "kv_heads", "head_dim")

        def project(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Linear:
            inputs = (spec.emb_dim,)
            return make.projection(name, inputs, shape, ("embed", *axes), scale=spec.init_scale, has_bias=spec.has_bias)

        def convolve(shape: tuple[int, int], axes: tuple[str | None, ...]) -> ShortConvolution:
            return ShortConvolution(shape, axes, taps=spec.taps, make=make, has_bias=spec.has_filter_bias)

        self.gate = project("gate", heads, of_heads)
        self.value = project("value", heads, of_heads)
        self.key = project("key", keys, of_keys)
        self.query = project("query", keys, of_keys)
        self.step = project("step", heads[:1], of_heads[:1])
        outputs, scale = (spec.emb_dim,), spec.out_scale
        self.out = make.projection("out", heads, outputs, (*of_heads, "embed"), scale=scale, has_bias=spec.has_bias)
        self.value_filter = convolve(heads, of_heads)
        self.key_filter = convolve(keys, of_keys)
        self.query_filter = convolve(keys, of_keys)
        self.log_speed = make.random(heads[:1], ("heads",), _log_speeds)
        self.step_bias = make.random(heads[:1], ("heads",), _step_biases)
        self.skip = make.ones(heads[:1], ("heads",))
        self.norm_scale = make.ones(heads, of_heads)

    @jax.named_scope("ssm")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        previous = stored_states(ctx)
        q_BTGS, k_BTGS, v_BTNP, tails = self._heads(x_BTD, ctx, previous)
        step_BTN = self._steps(x_BTD, ctx)
        out_BTNP, state_BNSP = state_space(
            q_BTGS,
            k_BTGS,
            v_BTNP * step_BTN[..., None],
            log_decay_BTN=-jnp.exp(_float32(self.log_speed[...])) * step_BTN,
            state_BNSP=previous.get("state"),
            starts_BT=None if ctx.segments is None else segment_starts(ctx.segments),
        )
        out_BTNP = out_BTNP + _float32(self.skip[...])[:, None] * v_BTNP
        out_BTNP = ctx.constrain(out_BTNP, "act_batch", "act_length", "act_heads", None)
        out_BTD = self.out(checkpoint_name(self._gate(out_BTNP, x_BTD, ctx), "context"), ctx)
        out_BTD = ctx.to_stream(out_BTD)
        cache = None if ctx.cache is None else ctx.cache.write({"state": state_BNSP, **tails}, ctx.rows)
        return MixerOutput(checkpoint_name(out_BTD, "attention_out"), cache, {})

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        """The state, in float32 because its rounding errors accumulate, and the tails of the convolutions."""
        spec, before, compute = self.spec, self.spec.taps - 1, self.spec.dtypes.compute
        state = StateSpec((spec.num_heads, spec.state_dim, spec.head_dim), jnp.float32, ("act_heads", None, None))
        of_values = StateSpec((before, spec.num_heads, spec.head_dim), compute, (None, "act_heads", None))
        of_keys = StateSpec((before, spec.num_groups, spec.state_dim), compute, (None, self._key_axis, None))
        return cache_spec.states(layers, {"state": state, "query": of_keys, "key": of_keys, "value": of_values})

    @property
    def _key_axis(self) -> str | None:
        return None if self.spec.num_groups == 1 else "act_kv_heads"

    def _heads(
        self, x_BTD: jax.Array, ctx: Context, previous: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array | None]]:
        """Queries, keys and values in float32 after their convolutions, zero for padding, and the new tails.

        They are gathered along the length: the recurrence passes through all tokens of a sequence.
        """
        branches = {
            "query": (self.query, self.query_filter, self._key_axis),
            "key": (self.key, self.key_filter, self._key_axis),
            "value": (self.value, self.value_filter, "act_heads"),
        }
        heads: dict[str, jax.Array] = {}
        tails: dict[str, jax.Array | None] = {}
        for name, (projection, convolution, axis) in branches.items():
            projected = ctx.constrain(projection(x_BTD, ctx), "act_batch", "act_length", axis, None)
            split = {"act_heads": ctx.place.heads, "act_kv_heads": ctx.place.kv_heads}
            place = dataclasses.replace(ctx.place, heads=None if axis is None else split[axis])
            convolved, tails[name] = convolution(
                checkpoint_name(projected, name), ctx.segments, previous.get(name), place
            )
            heads[name] = ctx.constrain(_float32(convolved), "act_batch", None, axis, None)
        return heads["query"], heads["key"], heads["value"], tails

    def _steps(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """softplus(step(x) + bias), and zero for padding, which leaves the state unchanged."""
        step_BTN = jax.nn.softplus(_float32(self.step(x_BTD, ctx)) + _float32(self.step_bias[...]))
        step_BTN = jnp.maximum(step_BTN, self.spec.min_step)
        if ctx.segments is not None:
            step_BTN = jnp.where((ctx.segments != 0)[..., None], step_BTN, 0)
        return ctx.constrain(step_BTN, "act_batch", None, "act_heads")

    def _gate(self, out_BTNP: jax.Array, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """norm(out * silu(gate(x))), normalized over the heads of a group."""
        gate_BTNP = ctx.constrain(self.gate(x_BTD, ctx), "act_batch", "act_length", "act_heads", None)
        gated_BTNP = out_BTNP * jax.nn.silu(_float32(gate_BTNP))
        grouped = gated_BTNP.reshape(*gated_BTNP.shape[:2], self.spec.num_groups, -1)
        normed_BTNP = unit_rms(grouped, self.spec.norm_eps).reshape(gated_BTNP.shape)
        normed_BTNP = (normed_BTNP * _float32(self.norm_scale[...])).astype(self.spec.dtypes.compute)
        return ctx.constrain(normed_BTNP, "act_batch", "act_length", "act_heads", None)


class Recurrence(NamedTuple):
    """Inputs of the recurrence in float32, by groups of heads."""

    query_BTGS: jax.Array
    key_BTGS: jax.Array
    value_BTGRP: jax.Array
    log_decay_BTGR: jax.Array
    state_BGRSP: jax.Array
    """State before the first token."""
    starts_BT: jax.Array | None
    """Tokens at which the state is reset to zero; None: no resets. Never the first token of a row."""


def state_space(
    query_BTGS: jax.Array,
    key_BTGS: jax.Array,
    value_BTNP: jax.Array,
    *,
    log_decay_BTN: jax.Array,
    state_BNSP: jax.Array | None,
    starts_BT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, N, P] and the state [B, N, S, P] after the last token."""
    (B, T, G, S), (N, P) = query_BTGS.shape, value_BTNP.shape[2:]
    groups = (G, N // G)
    inputs = Recurrence(
        query_BTGS,
        key_BTGS,
        value_BTNP.reshape(B, T, *groups, P),
        log_decay_BTN.reshape(B, T, *groups),
        jnp.zeros((B, *groups, S, P)) if state_BNSP is None else state_BNSP.reshape(B, *groups, S, P),
        starts_BT,
    )
    out_BTGRP, state_BGRSP = _one_token(inputs) if T == 1 else _by_chunks(inputs)
    return out_BTGRP.reshape(B, T, N, P), state_BGRSP.reshape(B, N, S, P)


def _one_token(inputs: Recurrence) -> tuple[jax.Array, jax.Array]:
    """The recurrence for one token of every row."""
    update_BGRSP = inputs.key_BTGS[:, 0, :, None, :, None] * inputs.value_BTGRP[:, 0, :, :, None, :]
    decay_BGR11 = jnp.exp(inputs.log_decay_BTGR[:, 0, :, :, None, None])
    state_BGRSP = decay_BGR11 * inputs.state_BGRSP + update_BGRSP
    return _einsum("BTGS,BGRSP->BTGRP", inputs.query_BTGS, state_BGRSP), state_BGRSP


def _by_chunks(inputs: Recurrence) -> tuple[jax.Array, jax.Array]:
    """Attention with decay within chunks, and a recurrence of their states."""
    B, T, *heads = inputs.value_BTGRP.shape
    chunks = -(-T // CHUNK)
    q, k, v, log_decay = (into_chunks(x, chunks) for x in inputs[:4])
    resets_CBI = None if inputs.starts_BT is None else jnp.cumsum(into_chunks(inputs.starts_BT, chunks), axis=-1)
    pairs_CBGRIJ, from_start_CBGRI, to_end_CBGRJ = decays(tokens_last(log_decay), resets_CBI)
    scores_CBGRIJ = _einsum("CBIGS,CBJGS->CBGIJ", q, k)[:, :, :, None] * pairs_CBGRIJ
    changes_CBGRSP = _einsum("CBJGS,CBJGRP->CBGRSP", k, v * _tokens_first(to_end_CBGRJ))

    def chunk(state_BGRSP: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        change_BGRSP, decay_BGR = inputs
        return decay_BGR[..., None, None] * state_BGRSP + change_BGRSP, state_BGRSP

    decays_CBGR = from_start_CBGRI[..., -1]
    state_BGRSP, before_CBGRSP = jax.lax.scan(chunk, inputs.state_BGRSP, (changes_CBGRSP, decays_CBGR))
    earlier_CBIGRP = _einsum("CBIGS,CBGRSP->CBIGRP", q, before_CBGRSP) * _tokens_first(from_start_CBGRI)
    out_CBIGRP = earlier_CBIGRP + _einsum("CBGRIJ,CBJGRP->CBIGRP", scores_CBGRIJ, v)
    return out_CBIGRP.swapaxes(0, 1).reshape(B, chunks * CHUNK, *heads)[:, :T], state_BGRSP


def _tokens_first(x_CBGRI: jax.Array) -> jax.Array:
    """[C, B, I, G, R, 1], which broadcasts over the values of a head."""
    return jnp.moveaxis(x_CBGRI, -1, 2)[..., None]


def _einsum(expression: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(expression, *arrays, precision="highest")


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _log_speeds(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, SLOWEST, FASTEST))


def _step_biases(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse softplus of steps whose logarithms are uniform."""
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(SHORTEST_STEP), jnp.log(LONGEST_STEP)))
    return step + jnp.log(-jnp.expm1(-step))
