"""Grouped-query attention (Ainslie et al., 2023) with rotary positions.

Shapes: B batch, T tokens, S keys (the T tokens, or the slots of the cache), D residual stream, N query heads, K key and
value heads, H head size.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.attention import Request
from maxhydra.kernels.fused_linear import Norm as Factors
from maxhydra.kernels.matmul import Layout
from maxhydra.kernels.paged_attention import Pages, paged_attention, serving
from maxhydra.kernels.qkv_rope import qkv_rope
from maxhydra.layers.attend import attend, cached_positions, written
from maxhydra.layers.chunks import chunks
from maxhydra.layers.context import Context
from maxhydra.layers.fused_decode import added, can_fuse, fused_normed, parts_of_normed, weight_read
from maxhydra.layers.interfaces import MixerOutput, visible_in_chunk, visible_keys
from maxhydra.layers.kernel_options import KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.kv_cache import Cache, CacheSpec, KeysValues, NoCache
from maxhydra.layers.linear import Linear, are_bare, joined, together
from maxhydra.layers.norm import Norm, NormSpec, PlainNorm, RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.qk_norm import heads_norm, normed_heads
from maxhydra.layers.rope import Rotation, cos_and_sin, rotate, turns
from maxhydra.layers.temperature import scale_queries


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Sizes and mechanisms of one kind of layer, resolved."""

    emb_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    has_sinks: bool
    qk_norm: config.QkNorm
    norm: NormSpec
    bias: config.AttentionBias
    is_gated: bool
    value: config.ValueSource
    has_value_norm: bool
    shares: str | None
    hands_on: bool
    """Whether layers of other kinds see the keys and values of this one."""
    temperature: tuple[int, float] | None
    rotation: Rotation | None
    wanted: KernelChoice
    heads_wanted: KernelChoice
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "AttentionSpec":
        own = kind.attention
        sources = [other.attention.shares for other in model.kinds.values()]
        head_dim = own.head_dim or model.head_dim
        return cls(
            emb_dim=model.emb_dim,
            num_heads=own.num_heads or model.num_heads,
            num_kv_heads=own.num_kv_heads or model.num_kv_heads,
            head_dim=head_dim,
            scale=own.scale or head_dim**-0.5,
            window=own.window,
            chunk=own.chunk,
            softcap=own.softcap,
            has_sinks=own.sinks,
            qk_norm=own.qk_norm,
            norm=NormSpec.of(model),
            bias=own.bias,
            is_gated=own.gated,
            value=own.value,
            has_value_norm=own.value_norm,
            shares=own.shares,
            hands_on=any(model.kinds[other] is kind for other in sources if other is not None),
            temperature=_temperature(own.temperature),
            rotation=Rotation.of(own.rope, head_dim),
            wanted=KernelChoice(model.kernels.attention.value, model.kernels.sizes("attention")),
            heads_wanted=KernelChoice(model.kernels.qkv_rope.value, model.kernels.sizes("qkv_rope")),
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )

    def build(self, make: ParamBuilder) -> "Attention":
        return Attention(self, make)

    def forward_flops(self, seq_len: int) -> float:
        """Operations per token: projections, then logits and weighted sum over the keys that a token sees."""
        of_keys = 0 if self.shares else 1 if self.value is config.ValueSource.key else 2
        of_queries = 3 if self.is_gated else 2
        weights = self.emb_dim * self.head_dim * (of_queries * self.num_heads + of_keys * self.num_kv_heads)
        keys = visible_in_chunk(self.chunk, seq_len) if self.chunk else visible_keys(self.window, seq_len)
        return 2.0 * weights + 4.0 * self.num_heads * self.head_dim * keys

    @property
    def turns_plainly(self) -> bool:
        """Whether nothing but positions changes the heads of a product of query, key and value."""
        is_plain = self.qk_norm is config.QkNorm.none and not self.has_value_norm and self.shares is None
        is_plain = is_plain and self.value is config.ValueSource.own
        return is_plain and self.rotation is not None and self.rotation.turns_halves(self.head_dim)

    @property
    def suits_pages(self) -> bool:
        """Whether the kernel for pages has all that is asked for."""
        is_plain = self.chunk is None and self.temperature is None and not (self.has_sinks or self.has_value_norm)
        is_plain = is_plain and self.value is config.ValueSource.own and not (self.shares or self.hands_on)
        return is_plain and (self.rotation is None or self.rotation.turns_halves(self.head_dim))


class Attention(nnx.Module):
    """out(attention(rope(query(x)), rope(key(x)), value(x)) * sigmoid(gate(x))), the gate where there is one."""

    def __init__(self, spec: AttentionSpec, make: ParamBuilder):
        self.spec = spec
        D, N, K, H = spec.emb_dim, spec.num_heads, spec.num_kv_heads, spec.head_dim
        inner = partial(make.projection, scale=spec.init_scale, has_bias=spec.bias is not config.AttentionBias.none)
        of_queries, of_keys = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        has_value = spec.shares is None and spec.value is config.ValueSource.own
        self.query = inner("query", (D,), (N, H), of_queries)
        self.key = inner("key", (D,), (K, H), of_keys) if spec.shares is None else None
        self.value = inner("value", (D,), (K, H), of_keys) if has_value else None
        has_bias = spec.bias is config.AttentionBias.all
        axes = ("heads", "head_dim", "embed")
        self.out = make.projection("out", (N, H), (D,), axes, scale=spec.out_scale, has_bias=has_bias)
        self.gate = inner("gate", (D,), (N, H), of_queries) if spec.is_gated else None
        self.query_norm = heads_norm(spec.qk_norm, spec.norm, N, H, make)
        self.key_norm = heads_norm(spec.qk_norm, spec.norm, K, H, make) if spec.shares is None else None
        self.value_norm = PlainNorm(eps=spec.norm.eps, dtypes=spec.dtypes) if spec.has_value_norm else None
        self.sinks = make.zeros((N,), ("heads",)) if spec.has_sinks else None

    @jax.named_scope("attention")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        pages, seen = self._pages(x_BTD, ctx), None
        if pages is None:
            mixed_BTNH, cache, seen = self._mix_heads(self._heads(x_BTD, ctx), ctx)
        else:
            mixed_BTNH, cache = self._mix_pages(self._joined_heads(x_BTD, ctx)[None], pages, ctx, then=None)
        mixed_BTNH = ctx.constrain(mixed_BTNH, "act_batch", "act_length", "act_heads", None)
        mixed_BTNH = checkpoint_name(mixed_BTNH, "context")
        if self.gate is not None:
            gate_BTNH = ctx.constrain(self.gate(x_BTD, ctx), "act_batch", "act_length", "act_heads", None)
            mixed_BTNH = mixed_BTNH * jax.nn.sigmoid(gate_BTNH.astype(jnp.float32)).astype(mixed_BTNH.dtype)
        out_BTD = self.out(mixed_BTNH, ctx)
        out_BTD = ctx.constrain(out_BTD, "act_batch", "act_length", "act_embed")
        return MixerOutput(checkpoint_name(out_BTD, "attention_out"), cache, {}, seen if self.spec.hands_on else None)

    @jax.named_scope("attention")
    def onto(self, x_BTD: jax.Array, norm: Norm | None, ctx: Context, *, then: Factors | None) -> MixerOutput | None:
        """x + attention(norm(x)) of a few tokens, by kernels that norm and add on the way, perhaps with the norm that
        comes then; None where they cannot."""
        if not isinstance(norm, RMSNorm) or self.gate is not None:
            return None
        if not (can_fuse(self._inputs, x_BTD, ctx) and can_fuse((self.out,), x_BTD, ctx)):
            return None
        pages, seen = self._pages(x_BTD, ctx), None
        if pages is None:
            heads_BTMH = fused_normed(self._inputs, x_BTD, norm, ctx)
            starts = np.cumsum([projection.width for projection in self._inputs])[:-1]
            heads = self._at_positions(jnp.split(heads_BTMH, starts, axis=2), ctx)
            mixed_BTNH, cache, seen = self._mix_heads(heads, ctx)
        else:
            heads_SBTMH = self._parts(x_BTD, norm, ctx)
            mixed_BTNH, cache = self._mix_pages(heads_SBTMH, pages, ctx, then=weight_read(self.out))
        out_BTD, normed_BTD = added(self.out, mixed_BTNH, x_BTD, then=then)
        return MixerOutput(out_BTD, cache, {}, seen if self.spec.hands_on else None, normed_BTD)

    def empty_cache(self, room: CacheSpec, layers: int) -> Cache:
        spec = self.spec
        if spec.shares is not None:
            return NoCache()
        return room.keys_and_values(
            layers=layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=spec.dtypes.compute
        )

    @property
    def _inputs(self) -> tuple[Linear, ...]:
        """The projections of query, key and value that there are, in this order."""
        return tuple(one for one in (self.query, self.key, self.value) if one is not None)

    def _mix_heads(self, heads: tuple[jax.Array, ...], ctx: Context) -> tuple[jax.Array, Any, KeysValues]:
        """What queries gather, the cache with this call's tokens, and the keys and values that were looked at; of heads
        with their positions."""
        q_BTNH, own = self._project(heads, ctx)
        seen, cache = self._keep(own, ctx)
        return self._mix(q_BTNH, seen, ctx), cache, seen

    def _project(
        self, heads: tuple[jax.Array, ...], ctx: Context
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Heads of query, and of key and value if they are its own, where they belong among the devices."""
        q_BTNH, *own = heads
        if self.spec.temperature is not None:
            q_BTNH = scale_queries(q_BTNH, ctx.positions, *self.spec.temperature)
        q_BTNH = checkpoint_name(ctx.constrain(q_BTNH, "act_batch", "act_length", "act_heads", None), "query")
        if not own:
            return q_BTNH, None
        k_BTKH, v_BTKH = (ctx.constrain(heads, "act_batch", "act_length", "act_kv_heads", None) for heads in own)
        return q_BTNH, (checkpoint_name(k_BTKH, "key"), checkpoint_name(v_BTKH, "value"))

    def _heads(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, ...]:
        """Of query, and where they are its own of key and value.

        In training one product where every device holds all heads, as on a single one: x is read once, and its gradient
        is written once instead of three times and added up. Heads that are split over devices would have to move for
        that, and to decode a token the weights would be copied for it unless they lie together.
        """
        is_whole = ctx.sharder.ways("heads") == ctx.sharder.ways("kv_heads") == 1
        is_one = (ctx.cache is None and is_whole) or self.query.product.layout is Layout.joined
        if is_one and self.spec.turns_plainly and are_bare(self._inputs):
            return self._turned(joined(self._inputs, x_BTD, ctx), ctx)
        if is_one:
            return self._at_positions(together(self._inputs, x_BTD, ctx), ctx)
        return self._at_positions([projection(x_BTD, ctx) for projection in self._inputs], ctx)

    def _at_positions(self, heads: list[jax.Array], ctx: Context) -> tuple[jax.Array, ...]:
        """Heads as products make them, normalised and turned."""
        q_BTNH = self._placed(heads[0], self.query_norm, ctx)
        if self.spec.shares is not None:
            return (q_BTNH,)
        v_BTKH = heads[-1] if self.value_norm is None else self.value_norm(heads[-1])
        return q_BTNH, self._placed(heads[1], self.key_norm, ctx), v_BTKH

    def _turned(self, heads_BTAH: jax.Array, ctx: Context) -> tuple[jax.Array, ...]:
        """Query, key and value of a product of all three."""
        spec = self.spec
        assert spec.rotation is not None
        cos_BTF, sin_BTF = cos_and_sin(ctx.positions[:, :, None], spec.rotation)
        with kernel_errors_as_config_errors():
            return qkv_rope(
                heads_BTAH,
                cos_BTF,
                sin_BTF,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                **spec.heads_wanted._asdict(),
                place=ctx.place,
            )

    def _placed(self, heads: jax.Array, norm: Norm | None, ctx: Context) -> jax.Array:
        """Queries or keys, normalised and turned."""
        heads = normed_heads(heads, self.spec.qk_norm, norm)
        return heads if self.spec.rotation is None else rotate(heads, ctx.positions, self.spec.rotation)

    def _keep(self, own: tuple[jax.Array, jax.Array] | None, ctx: Context) -> tuple[KeysValues, Any]:
        """The keys and values to look at, and the cache with this call's in it."""
        if own is None:
            assert self.spec.shares is not None
            return ctx.shared[self.spec.shares], ctx.cache
        k_BTKH, v_BTKH = own
        if ctx.cache is None:
            return KeysValues(self._whole(k_BTKH, ctx), self._whole(v_BTKH, ctx), None), None
        cache = written(k_BTKH, v_BTKH, ctx)
        if ctx.is_fresh and cache.is_exact(self.spec.dtypes.compute):
            return KeysValues(self._whole(k_BTKH, ctx), self._whole(v_BTKH, ctx), None), cache
        kept: KeysValues = cache.read(ctx.rows, self.spec.dtypes.compute)
        return KeysValues(self._whole(kept.key_BSKH, ctx), self._whole(kept.value_BSKH, ctx), kept.positions_BS), cache

    def _mix(self, q_BTNH: jax.Array, seen: KeysValues, ctx: Context) -> jax.Array:
        """Gather values over the tokens at hand, or over those in the cache and the ones at hand.

        Padding behind the tokens that begin a sequence is later than any of them, and its own answers are not used.
        """
        tokens: dict[str, jax.Array | None] = {}
        if seen.positions_BS is not None:
            tokens = {"q_positions_BT": cached_positions(ctx), "kv_positions_BS": seen.positions_BS}
        elif ctx.cache is None:
            segments = chunks(ctx.segments, ctx.positions, self.spec.chunk)
            tokens = {"q_segments_BT": segments, "kv_segments_BS": segments}
        return self._attend(q_BTNH, seen.key_BSKH, seen.value_BSKH, ctx, **tokens)

    def _pages(self, x_BTD: jax.Array, ctx: Context) -> Pages | None:
        """The cache as the kernel for one new token a row takes it; None where that cannot serve."""
        inputs = self._inputs
        is_plain = are_bare(inputs) and self.spec.suits_pages
        if ctx.cache is None or self.spec.wanted.backend != "auto" or not is_plain or x_BTD.shape[1] > 1:
            return None
        pages: Pages | None = ctx.cache.pages(cached_positions(ctx), ctx.rows)
        return pages if pages is not None and serving(pages, x_BTD.dtype.name, ctx.place) else None

    def _joined_heads(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """Heads of query, key and value in one array."""
        if self.query.product.layout is Layout.joined:
            return joined(self._inputs, x_BTD, ctx)
        return jnp.concatenate([projection(x_BTD, ctx) for projection in self._inputs], axis=2)

    def _parts(self, x_BTD: jax.Array, norm: RMSNorm, ctx: Context) -> jax.Array:
        """Heads of all three in one array, as parts whose sum they are, but one part where they are normed."""
        if self.query_norm is not None:
            return fused_normed(self._inputs, x_BTD, norm, ctx)[None]
        return parts_of_normed(self._inputs, x_BTD, norm, ctx)

    def _mix_pages(
        self, heads_SB1MH: jax.Array, pages: Pages, ctx: Context, *, then: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        """What _mix_heads does, from the heads of all three in one array to the cache with the new token; `then`: the
        weight that comes next."""
        spec, heads_SBMH = self.spec, heads_SB1MH[:, :, 0]
        if self.query_norm is not None:
            (heads_BMH,) = heads_SBMH
            q, k, v = jnp.split(heads_BMH, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=1)
            q, k = (normed_heads(x, spec.qk_norm, norm) for x, norm in ((q, self.query_norm), (k, self.key_norm)))
            heads_SBMH = jnp.concatenate([q, k, v], axis=1)[None]
        turn = None if spec.rotation is None else turns(ctx.positions[:, 0], spec.rotation)
        backend = serving(pages, pages.key_PKZH.dtype.name, ctx.place)
        assert backend is not None
        mixed_BNH, pages = paged_attention(heads_SBMH, turn, pages, self._request(ctx), then=then, backend=backend)
        return mixed_BNH[:, None], ctx.cache.with_pages(pages)

    def _whole(self, kv_BSKH: jax.Array, ctx: Context) -> jax.Array:
        """Keys or values of whole sequences on each device: queries may be split along the sequence, these are not."""
        return ctx.constrain(kv_BSKH, "act_batch", None, "act_kv_heads", None)

    def _attend(
        self, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ctx: Context, **tokens: jax.Array | None
    ) -> jax.Array:
        sinks_N = None if self.sinks is None else self.sinks[...]
        request, wanted = self._request(ctx), self.spec.wanted
        return attend(q_BTNH, k_BSKH, v_BSKH, request, ctx, wanted=wanted, sinks_N=sinks_N, **tokens)

    def _request(self, ctx: Context) -> Request:
        spec = self.spec
        # Where segments stand for chunks, these are windows too, which lets a backend skip what lies before them.
        is_cut = ctx.cache is None and ctx.segments is not None and spec.chunk is not None
        return Request(
            scale=spec.scale,
            causal=True,
            window=spec.chunk if is_cut else spec.window,
            chunk=None if is_cut else spec.chunk,
            softcap=spec.softcap,
            softmax_dtype=spec.dtypes.softmax.name,
            is_length_split=ctx.is_length_split,
        )


def _temperature(temperature: config.Temperature) -> tuple[int, float] | None:
    floor, scale = temperature.floor, temperature.scale
    return None if floor is None or scale is None else (floor, scale)
