"""Grouped-query attention (Ainslie et al., 2023) with rotary position embedding.

Shapes: B batch, T tokens, S keys (the T tokens, or the slots of the cache), D residual stream, N query heads, K key and
value heads, M = N + 2K heads of query, key and value, H head size, P partial sums of a split-K matmul.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.attention import Request, attention
from maxhydra.kernels.matmul import Layout
from maxhydra.kernels.paged_attention import Pages, find_backend, paged_attention, write_prompts
from maxhydra.kernels.qkv_rope import qkv_rope
from maxhydra.layers.context import Context, KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.interfaces import AuxOutputs, MixerOutput, visible_in_chunk, visible_keys
from maxhydra.layers.kv_cache import Cache, CacheSpec, KeysValues, NoCache
from maxhydra.layers.linear import Linear, are_bare, fused_matmul, project_together
from maxhydra.layers.norm import Norm, NormSpec, PlainNorm
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.rope import Rotation, cos_and_sin, paged_rope_factors, rotate
from maxhydra.layers.statistics import logit_statistics


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Sizes and options of attention in one layer kind, resolved from the config."""

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
    """Layer kind whose keys and values this one attends to; None if it has its own."""
    is_shared: bool
    """Whether layers of other kinds attend to the keys and values of this one."""
    temperature: tuple[int, float] | None
    rotation: Rotation | None
    kernel: KernelChoice
    qkv_rope_kernel: KernelChoice
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "AttentionSpec":
        section = kind.attention
        sources = [other.attention.shares for other in model.kinds.values()]
        head_dim = section.head_dim or model.head_dim
        return cls(
            emb_dim=model.emb_dim,
            num_heads=section.num_heads or model.num_heads,
            num_kv_heads=section.num_kv_heads or model.num_kv_heads,
            head_dim=head_dim,
            scale=section.scale or head_dim**-0.5,
            window=section.window,
            chunk=section.chunk,
            softcap=section.softcap,
            has_sinks=section.sinks,
            qk_norm=section.qk_norm,
            norm=NormSpec.of(model),
            bias=section.bias,
            is_gated=section.gated,
            value=section.value,
            has_value_norm=section.value_norm,
            shares=section.shares,
            is_shared=any(model.kinds[other] is kind for other in sources if other is not None),
            temperature=_temperature(section.temperature),
            rotation=Rotation.of(section.rope, head_dim),
            kernel=KernelChoice(model.kernels.attention.value, model.kernels.sizes("attention")),
            qkv_rope_kernel=KernelChoice(model.kernels.qkv_rope.value, model.kernels.sizes("qkv_rope")),
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )

    def build(self, make: ParamBuilder) -> "Attention":
        return Attention(self, make)

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token: projections, then logits and weighted sum over the visible keys."""
        key_projections = 0 if self.shares else 1 if self.value is config.ValueSource.key else 2
        query_projections = 3 if self.is_gated else 2
        heads = query_projections * self.num_heads + key_projections * self.num_kv_heads
        keys = visible_in_chunk(self.chunk, seq_len) if self.chunk else visible_keys(self.window, seq_len)
        return 2.0 * self.emb_dim * self.head_dim * heads + 4.0 * self.num_heads * self.head_dim * keys

    @property
    def uses_qkv_rope(self) -> bool:
        """Whether RoPE is the only operation between the fused QKV matmul and attention, so qkv_rope applies."""
        is_plain = self.qk_norm is config.QkNorm.none and not self.has_value_norm and self.shares is None
        is_plain = is_plain and self.value is config.ValueSource.own
        return is_plain and self.rotation is not None and self.rotation.rotates_halves(self.head_dim)

    @property
    def supports_paged_kernel(self) -> bool:
        """Whether the paged attention kernel implements every option of this layer kind."""
        is_plain = self.chunk is None and self.temperature is None and not (self.has_sinks or self.has_value_norm)
        is_plain = is_plain and self.value is config.ValueSource.own and not (self.shares or self.is_shared)
        return is_plain and (self.rotation is None or self.rotation.rotates_halves(self.head_dim))


class Attention(nnx.Module):
    """out(attention(rope(query(x)), rope(key(x)), value(x)) * sigmoid(gate(x))), with an optional gate."""

    def __init__(self, spec: AttentionSpec, make: ParamBuilder):
        self.spec = spec
        D, N, K, H = spec.emb_dim, spec.num_heads, spec.num_kv_heads, spec.head_dim
        inner = partial(make.projection, scale=spec.init_scale, has_bias=spec.bias is not config.AttentionBias.none)
        query_axes, key_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        has_value = spec.shares is None and spec.value is config.ValueSource.own
        self.query = inner("query", (D,), (N, H), query_axes)
        self.key = inner("key", (D,), (K, H), key_axes) if spec.shares is None else None
        self.value = inner("value", (D,), (K, H), key_axes) if has_value else None
        has_bias = spec.bias is config.AttentionBias.all
        out_axes = ("heads", "head_dim", "embed")
        self.out = make.projection("out", (N, H), (D,), out_axes, scale=spec.out_scale, has_bias=has_bias)
        self.gate = inner("gate", (D,), (N, H), query_axes) if spec.is_gated else None
        self.query_norm = build_qk_norm(spec, N, make)
        self.key_norm = build_qk_norm(spec, K, make) if spec.shares is None else None
        self.value_norm = PlainNorm(eps=spec.norm.eps, dtypes=spec.dtypes) if spec.has_value_norm else None
        self.sinks = make.zeros((N,), ("heads",)) if spec.has_sinks else None

    @jax.named_scope("attention")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        pages, shared, aux = self.usable_pages(x_BTD, ctx), None, {}
        if pages is None:
            heads = self._heads(x_BTD, ctx)
            attended_BTNH, cache, shared = self.mix_heads(heads, ctx)
            aux = self._statistics(heads, shared, ctx) if ctx.has_statistics else {}
        else:
            attended_BTNH, cache = self.mix_pages(self._qkv_heads(x_BTD, ctx)[None], pages, ctx, next_weight=None)
        attended_BTNH = ctx.constrain(attended_BTNH, "act_batch", "act_length", "act_heads", None)
        attended_BTNH = checkpoint_name(attended_BTNH, "context")
        if self.gate is not None:
            gate_BTNH = ctx.constrain(self.gate(x_BTD, ctx), "act_batch", "act_length", "act_heads", None)
            attended_BTNH = attended_BTNH * jax.nn.sigmoid(gate_BTNH.astype(jnp.float32)).astype(attended_BTNH.dtype)
        out_BTD = self.out(attended_BTNH, ctx)
        out_BTD = ctx.to_stream(out_BTD)
        return MixerOutput(
            checkpoint_name(out_BTD, "attention_out"), cache, aux, shared if self.spec.is_shared else None
        )

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        spec = self.spec
        if spec.shares is not None:
            return NoCache()
        return cache_spec.keys_and_values(
            layers=layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=spec.dtypes.compute
        )

    @property
    def qkv(self) -> tuple[Linear, ...]:
        """The projections of query, key and value that this layer has, in this order."""
        return tuple(projection for projection in (self.query, self.key, self.value) if projection is not None)

    def _heads(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, ...]:
        """Heads of query, and of key and value unless they are shared, normalized and rotated.

        In training one fused QKV matmul if every device holds all heads: x is read once, and its gradient is written
        once instead of three times and summed. Heads that are sharded over devices would have to move for that. In
        decoding the weights would be copied into one on every step unless they are stored as one (Layout.joined).
        """
        is_whole = ctx.sharder.num_shards("heads") == ctx.sharder.num_shards("kv_heads") == 1
        is_fused = (ctx.cache is None and is_whole) or self.query.matmul_spec.layout is Layout.joined
        if is_fused and self.spec.uses_qkv_rope and are_bare(self.qkv):
            return self._qkv_rope(fused_matmul(self.qkv, x_BTD, ctx), ctx)
        if is_fused:
            return self.normalize_and_rotate(project_together(self.qkv, x_BTD, ctx), ctx)
        return self.normalize_and_rotate([projection(x_BTD, ctx) for projection in self.qkv], ctx)

    def _qkv_rope(self, heads_BTMH: jax.Array, ctx: Context) -> tuple[jax.Array, ...]:
        """Query, key and value from the output of a fused QKV matmul, rotated in the same kernel that splits them."""
        spec = self.spec
        assert spec.rotation is not None
        cos_BTF, sin_BTF = cos_and_sin(ctx.positions[:, :, None], spec.rotation)
        with kernel_errors_as_config_errors():
            return qkv_rope(
                heads_BTMH,
                cos_BTF,
                sin_BTF,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                **spec.qkv_rope_kernel._asdict(),
                place=ctx.place,
            )

    def normalize_and_rotate(self, heads: list[jax.Array], ctx: Context) -> tuple[jax.Array, ...]:
        """Projected heads with QK norm, value norm and RoPE applied."""
        q_BTNH = self._rotate(heads[0], self.query_norm, ctx)
        if self.spec.shares is not None:
            return (q_BTNH,)
        v_BTKH = heads[-1] if self.value_norm is None else self.value_norm(heads[-1])
        return q_BTNH, self._rotate(heads[1], self.key_norm, ctx), v_BTKH

    def _rotate(self, heads: jax.Array, norm: Norm | None, ctx: Context) -> jax.Array:
        heads = normalize_heads(heads, self.spec.qk_norm, norm)
        return heads if self.spec.rotation is None else rotate(heads, ctx.positions, self.spec.rotation)

    def mix_heads(self, heads: tuple[jax.Array, ...], ctx: Context) -> tuple[jax.Array, Any, KeysValues]:
        """Attention output [B, T, N, H], the updated cache, and the keys and values attended to."""
        q_BTNH, own = self._place_heads(heads, ctx)
        keys_values, cache = self._update_cache(own, ctx)
        return self._attend(q_BTNH, keys_values, ctx), cache, keys_values

    def _statistics(self, heads: tuple[jax.Array, ...], keys_values: KeysValues, ctx: Context) -> AuxOutputs:
        segments_BT = chunk_segments(ctx.segments, ctx.positions, self.spec.chunk)
        q_BTNH = self._place_heads(heads, ctx)[0]
        seen = {"segments_BT": segments_BT, "selected_BTS": ctx.keys_within_images(self.spec.window)}
        return logit_statistics(q_BTNH, keys_values.key_BSKH, self._request(ctx), ctx, **seen)

    def _place_heads(
        self, heads: tuple[jax.Array, ...], ctx: Context
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Queries, and the layer's own keys and values if it has any, sharded and named for rematerialization."""
        q_BTNH, *own = heads
        if self.spec.temperature is not None:
            q_BTNH = scale_queries(q_BTNH, ctx.positions, *self.spec.temperature)
        q_BTNH = checkpoint_name(ctx.constrain(q_BTNH, "act_batch", "act_length", "act_heads", None), "query")
        if not own:
            return q_BTNH, None
        k_BTKH, v_BTKH = (ctx.constrain(heads, "act_batch", "act_length", "act_kv_heads", None) for heads in own)
        return q_BTNH, (checkpoint_name(k_BTKH, "key"), checkpoint_name(v_BTKH, "value"))

    def _update_cache(self, own: tuple[jax.Array, jax.Array] | None, ctx: Context) -> tuple[KeysValues, Any]:
        """The keys and values to attend to, and the cache with those of this call."""
        if own is None:
            assert self.spec.shares is not None
            return ctx.shared[self.spec.shares], ctx.cache
        k_BTKH, v_BTKH = own
        if ctx.cache is None:
            return KeysValues(k_BTKH, v_BTKH, None), None
        cache = write_cache(k_BTKH, v_BTKH, ctx)
        if ctx.is_fresh and cache.is_exact(self.spec.dtypes.compute):
            return KeysValues(k_BTKH, v_BTKH, None), cache
        cached: KeysValues = cache.read(ctx.rows, self.spec.dtypes.compute)
        k_BSKH, v_BSKH = (ctx.constrain(kv, "act_batch", None, "act_kv_heads", None) for kv in cached[:2])
        return KeysValues(k_BSKH, v_BSKH, cached.positions_BS), cache

    def _attend(self, q_BTNH: jax.Array, keys_values: KeysValues, ctx: Context) -> jax.Array:
        """Attention over the tokens of this call, or over the cache, which includes them.

        Padding behind the tokens that start a sequence comes later than all of them, and its own output is not used.
        """
        tokens: dict[str, Any] = {}
        if keys_values.positions_BS is not None:
            tokens = {"q_positions_BT": cached_positions(ctx), "kv_positions_BS": keys_values.positions_BS}
        elif ctx.cache is None:
            segments = chunk_segments(ctx.segments, ctx.positions, self.spec.chunk)
            tokens = {"q_segments_BT": segments, "kv_segments_BS": segments}
        tokens["selected_BTS"] = ctx.keys_within_images(self.spec.window)
        tokens["sinks_N"] = None if self.sinks is None else self.sinks[...]
        k_BSKH, v_BSKH, _ = keys_values
        return attend(q_BTNH, k_BSKH, v_BSKH, self._request(ctx), ctx, kernel=self.spec.kernel, **tokens)

    def usable_pages(self, x_BTD: jax.Array, ctx: Context) -> Pages | None:
        """The paged cache for the kernel that decodes one token per row; None if that kernel does not apply."""
        is_plain = are_bare(self.qkv) and self.spec.supports_paged_kernel
        if ctx.cache is None or self.spec.kernel.backend != "auto" or not is_plain or x_BTD.shape[1] > 1:
            return None
        pages: Pages | None = ctx.cache.pages(cached_positions(ctx), ctx.rows)
        return pages if pages is not None and find_backend(pages, x_BTD.dtype.name, ctx.place) else None

    def _qkv_heads(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """Heads of query, key and value in one array [B, T, M, H]."""
        if self.query.matmul_spec.layout is Layout.joined:
            return fused_matmul(self.qkv, x_BTD, ctx)
        return jnp.concatenate([projection(x_BTD, ctx) for projection in self.qkv], axis=2)

    def mix_pages(
        self, heads_PB1MH: jax.Array, pages: Pages, ctx: Context, *, next_weight: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        """`mix_heads` by the paged kernel, from partial sums of the QKV heads of one token per row.

        `next_weight`: the weight of the next matmul, which the kernel prefetches.
        """
        spec, heads_PBMH = self.spec, heads_PB1MH[:, :, 0]
        if self.query_norm is not None:
            (heads_BMH,) = heads_PBMH
            q, k, v = jnp.split(heads_BMH, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=1)
            q, k = (normalize_heads(x, spec.qk_norm, norm) for x, norm in ((q, self.query_norm), (k, self.key_norm)))
            heads_PBMH = jnp.concatenate([q, k, v], axis=1)[None]
        rotation = None if spec.rotation is None else paged_rope_factors(ctx.positions[:, 0], spec.rotation)
        backend = find_backend(pages, pages.key_PKZH.dtype.name, ctx.place)
        assert backend is not None
        request = self._request(ctx)
        mixed_BNH, pages = paged_attention(
            heads_PBMH, rotation, pages, request, then=next_weight, backend=backend, place=ctx.place
        )
        return mixed_BNH[:, None], ctx.cache.with_pages(pages)

    def _request(self, ctx: Context) -> Request:
        spec = self.spec
        is_causal = ctx.image_groups_BT is None
        # Segments already separate the chunks; as windows they also let a backend skip the keys before them.
        has_chunk_segments = ctx.cache is None and ctx.segments is not None and spec.chunk is not None
        return Request(
            scale=spec.scale,
            causal=is_causal,
            window=(spec.chunk if has_chunk_segments else spec.window) if is_causal else None,
            chunk=None if has_chunk_segments else spec.chunk,
            softcap=spec.softcap,
            softmax_dtype=spec.dtypes.softmax.name,
        )


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    ctx: Context,
    *,
    kernel: KernelChoice,
    has_whole_keys: bool = False,
    **tokens: jax.Array | None,
) -> jax.Array:
    """The attention kernel of the config; an unsupported explicit backend is raised as a ConfigError."""
    options: dict[str, Any] = {**kernel._asdict(), "place": ctx.place, "has_whole_keys": has_whole_keys, **tokens}
    with kernel_errors_as_config_errors():
        return attention(q_BTNH, k_BSKH, v_BSKH, request, **options)


def cached_positions(ctx: Context) -> jax.Array:
    """Positions of the tokens of this call as caches take them, -1 for padding."""
    return ctx.positions if ctx.segments is None else jnp.where(ctx.segments == 0, -1, ctx.positions)


def write_cache(key_BTKH: jax.Array, value_BTKH: jax.Array, ctx: Context) -> Any:
    """The cache with the keys and values of this call written to it."""
    cache, slots = ctx.cache, (cached_positions(ctx), ctx.rows)
    if not ctx.is_fresh:
        return cache.insert(key_BTKH, value_BTKH, *slots)
    pages: Pages | None = cache.pages(*slots)
    written = None if pages is None else write_prompts(pages, key_BTKH, value_BTKH, ctx.place)
    return cache.begin(key_BTKH, value_BTKH, *slots) if written is None else cache.with_pages(written)


def build_qk_norm(spec: AttentionSpec, heads: int, make: ParamBuilder) -> Norm | None:
    """Norm of queries or keys (Henry et al., 2020), which bounds the attention logits; None without one.

    It is applied before RoPE. Without a scale the order makes no difference: a rotation keeps the mean square.
    """
    if spec.qk_norm is config.QkNorm.none:
        return None
    if spec.qk_norm is config.QkNorm.head_plain:
        return PlainNorm(eps=spec.norm.eps, dtypes=spec.norm.dtypes)
    return spec.norm.build(heads * spec.head_dim if spec.qk_norm is config.QkNorm.whole else spec.head_dim, make)


def normalize_heads(x: jax.Array, kind: config.QkNorm, norm: Norm | None) -> jax.Array:
    """Heads [..., N, H] normalized one by one, or over all heads of a token."""
    if norm is None:
        return x
    if kind is config.QkNorm.whole:
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
    return norm(x)


def scale_queries(q_BTNH: jax.Array, positions_BT: jax.Array, floor: int, scale: float) -> jax.Array:
    """q * (1 + scale * ln(1 + floor((position + 1) / floor))): attention stays sharp at length (Nakanishi, 2025)."""
    steps_BT = jnp.floor((positions_BT.astype(jnp.float32) + 1) / floor)
    factor_BT = 1 + scale * jnp.log1p(steps_BT)
    return (q_BTNH.astype(jnp.float32) * factor_BT[:, :, None, None]).astype(q_BTNH.dtype)


def chunk_segments(segments_BT: jax.Array | None, positions_BT: jax.Array, chunk: int | None) -> jax.Array | None:
    """Segments that also separate the chunks of each sequence (Llama 4, 2025), for rows that pack sequences.

    A token attends only within its chunk. Chunks are counted from the start of each sequence. 0 is padding.
    """
    if segments_BT is None or chunk is None:
        return segments_BT
    is_first_BT = (segments_BT != jnp.roll(segments_BT, 1, axis=1)).at[:, 0].set(True)
    numbers_BT = jnp.cumsum(is_first_BT | (positions_BT % chunk == 0), axis=1)
    return jnp.where(segments_BT == 0, 0, numbers_BT)


def _temperature(temperature: config.Temperature) -> tuple[int, float] | None:
    floor, scale = temperature.floor, temperature.scale
    return None if floor is None or scale is None else (floor, scale)
