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
from maxhydra.layers.attention_heads import (
    QueryTemperature,
    build_qk_norm,
    chunk_segments,
    normalize_heads,
    scale_queries,
)
from maxhydra.layers.context import Context, KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.interfaces import AuxOutputs, MixerOutput, visible_in_chunk, visible_keys
from maxhydra.layers.kv_cache import Cache, CacheSpec, KeysValues, NoCache
from maxhydra.layers.linear import Linear, are_bare, fused_matmul, project_together
from maxhydra.layers.moba import BlockSpec, attend_to_blocks, visible_in_blocks
from maxhydra.layers.norm import Norm, NormSpec
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.qk_clip import HEAD_LOGITS, clip_factors, clip_heads
from maxhydra.layers.rope import Rotation, cos_and_sin, paged_rope_factors, rotate
from maxhydra.layers.statistics import largest_logits, logit_statistics


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Sizes and options of attention in one layer kind, resolved from the config."""

    emb_dim: int
    out_dim: int
    """Width of the output: latent_dim of the layer kind, or emb_dim."""
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
    value_norm: config.QkNorm
    shares: str | None
    """Layer kind whose keys and values this one attends to; None if it has its own."""
    is_shared: bool
    """Whether layers of other kinds attend to the keys and values of this one."""
    temperature: QueryTemperature | None
    rotation: Rotation | None
    qk_clip: float | None
    blocks: BlockSpec | None
    """Mixture of block attention; None: attention to all visible keys."""
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
            out_dim=kind.latent_dim or model.emb_dim,
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
            value_norm=_value_norm(section),
            shares=section.shares,
            is_shared=any(model.kinds[other] is kind for other in sources if other is not None),
            temperature=QueryTemperature.of(section.temperature),
            rotation=Rotation.of(section.rope, head_dim, has_axes=model.vision.num_layers is not None),
            qk_clip=model.qk_clip,
            blocks=BlockSpec.of(section.moba),
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
        query_projections = 2 if self.is_gated else 1
        heads = query_projections * self.num_heads + key_projections * self.num_kv_heads
        weights = self.head_dim * (self.emb_dim * heads + self.out_dim * self.num_heads)
        keys = visible_in_chunk(self.chunk, seq_len) if self.chunk else visible_keys(self.window, seq_len)
        if self.blocks is not None:
            keys = visible_in_blocks(self.blocks, seq_len)
        return 2.0 * weights + 4.0 * self.num_heads * self.head_dim * keys

    def apply_aux_updates(self, new: Any, aux: AuxOutputs) -> Any:
        """The weights after an optimizer step, with large attention logits clipped (qk_clip.py)."""
        assert self.qk_clip is not None
        has_own_keys = self.num_heads == self.num_kv_heads and self.value is config.ValueSource.own
        has_own_keys = has_own_keys and self.shares is None and not self.is_shared
        return clip_heads(new, clip_factors(aux[HEAD_LOGITS], self.qk_clip), has_own_keys=has_own_keys)

    @property
    def uses_qkv_rope(self) -> bool:
        """Whether RoPE is the only operation between the fused QKV matmul and attention, so qkv_rope applies."""
        is_plain = self.qk_norm is config.QkNorm.none and self.value_norm is config.QkNorm.none and self.shares is None
        is_plain = is_plain and self.value is config.ValueSource.own
        return is_plain and self.rotation is not None and self.rotation.rotates_halves(self.head_dim)

    @property
    def supports_paged_kernel(self) -> bool:
        """Whether the paged attention kernel implements every option of this layer kind."""
        is_plain = (self.chunk, self.blocks, self.temperature) == (None, None, None) and not self.has_sinks
        is_plain = is_plain and self.value_norm is config.QkNorm.none
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
        self.out = make.projection("out", (N, H), (spec.out_dim,), out_axes, scale=spec.out_scale, has_bias=has_bias)
        self.gate = inner("gate", (D,), (N, H), query_axes) if spec.is_gated else None
        self.query_norm = build_qk_norm(spec.qk_norm, spec.norm, (N, H), make)
        self.key_norm = build_qk_norm(spec.qk_norm, spec.norm, (K, H), make) if spec.shares is None else None
        self.value_norm = build_qk_norm(spec.value_norm, spec.norm, (K, H), make)
        self.sinks = make.zeros((N,), ("heads",)) if spec.has_sinks else None

    @jax.named_scope("attention")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        pages, shared, aux = self.usable_pages(x_BTD, ctx), None, {}
        if pages is None:
            heads = self._heads(x_BTD, ctx)
            attended_BTNH, cache, shared = self.mix_heads(heads, ctx)
            aux = self._statistics(heads, shared, ctx)
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
        cos_BTF, sin_BTF = cos_and_sin(ctx.rotary_positions, spec.rotation)
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
        return heads if self.spec.rotation is None else rotate(heads, ctx.rotary_positions, self.spec.rotation)

    def mix_heads(self, heads: tuple[jax.Array, ...], ctx: Context) -> tuple[jax.Array, Any, KeysValues]:
        """Attention output [B, T, N, H], the updated cache, and the keys and values attended to."""
        q_BTNH, own = self._place_heads(heads, ctx)
        keys_values, cache = self._update_cache(own, ctx)
        return self._attend(q_BTNH, keys_values, ctx), cache, keys_values

    def _statistics(self, heads: tuple[jax.Array, ...], keys_values: KeysValues, ctx: Context) -> AuxOutputs:
        has_clip = self.spec.qk_clip is not None and ctx.cache is None
        if not (ctx.has_statistics or has_clip):
            return {}
        segments_BT = chunk_segments(ctx.segments, ctx.positions, self.spec.chunk)
        arrays = self._place_heads(heads, ctx)[0], keys_values.key_BSKH
        within_BTS = ctx.selected_keys(self.spec.window)
        aux = logit_statistics(*arrays, self._request(ctx), ctx, segments_BT=segments_BT, selected_BTS=within_BTS)
        if has_clip:
            request = self._request(ctx)
            aux[HEAD_LOGITS] = largest_logits(*arrays, request, ctx, segments_BT=segments_BT, selected_BTS=within_BTS)
        return aux

    def _place_heads(
        self, heads: tuple[jax.Array, ...], ctx: Context
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Queries, and the layer's own keys and values if it has any, sharded and named for rematerialization."""
        q_BTNH, *own = heads
        q_BTNH = scale_queries(q_BTNH, ctx.positions, self.spec.temperature)
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
        if self.spec.blocks is not None:
            return attend_to_blocks(q_BTNH, keys_values, self._request(ctx), ctx, blocks=self.spec.blocks)
        tokens: dict[str, Any] = {}
        if keys_values.positions_BS is not None:
            tokens = {"q_positions_BT": ctx.cached_positions_BT, "kv_positions_BS": keys_values.positions_BS}
        elif ctx.cache is None:
            segments = chunk_segments(ctx.segments, ctx.positions, self.spec.chunk)
            tokens = {"q_segments_BT": segments, "kv_segments_BS": segments}
        tokens["selected_BTS"] = ctx.selected_keys(self.spec.window)
        tokens["sinks_N"] = None if self.sinks is None else self.sinks[...]
        k_BSKH, v_BSKH, _ = keys_values
        return attend(q_BTNH, k_BSKH, v_BSKH, self._request(ctx), ctx, kernel=self.spec.kernel, **tokens)

    def usable_pages(self, x_BTD: jax.Array, ctx: Context) -> Pages | None:
        """The paged cache for the kernel that decodes one token per row; None if that kernel does not apply."""
        is_plain = are_bare(self.qkv) and self.spec.supports_paged_kernel
        if ctx.cache is None or self.spec.kernel.backend != "auto" or not is_plain or x_BTD.shape[1] > 1:
            return None
        pages: Pages | None = ctx.cache.pages(ctx.cached_positions_BT, ctx.rows)
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
        rotation = None if spec.rotation is None else paged_rope_factors(ctx.rotary_positions[:, 0, 0], spec.rotation)
        backend = find_backend(pages, pages.key_PKZH.dtype.name, ctx.place)
        assert backend is not None
        request = self._request(ctx)
        mixed_BNH, pages = paged_attention(
            heads_PBMH, rotation, pages, request, then=next_weight, backend=backend, place=ctx.place
        )
        return mixed_BNH[:, None], ctx.cache.with_pages(pages)

    def _request(self, ctx: Context) -> Request:
        spec = self.spec
        is_causal = ctx.is_causal(spec.window)
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


def write_cache(key_BTKH: jax.Array, value_BTKH: jax.Array, ctx: Context) -> Any:
    """The cache with the keys and values of this call written to it."""
    cache, slots = ctx.cache, (ctx.cached_positions_BT, ctx.rows)
    if not ctx.is_fresh:
        return cache.insert(key_BTKH, value_BTKH, *slots)
    pages: Pages | None = cache.pages(*slots)
    written = None if pages is None else write_prompts(pages, key_BTKH, value_BTKH, ctx.place)
    return cache.begin(key_BTKH, value_BTKH, *slots) if written is None else cache.with_pages(written)


def _value_norm(section: config.Attention) -> config.QkNorm:
    if not section.value_norm:
        return config.QkNorm.none
    return config.QkNorm.head if section.value_norm_scale else config.QkNorm.head_plain
