"""Multi-head latent attention (DeepSeek-V2, 2024), optionally with the sparse indexer of DeepSeek-V3.2.

Each token caches a latent, from which the keys and values of all heads are projected, and one rotated key that all
heads share. With many queries, keys and values are projected from the latents. With few queries over a long cache it is
cheaper to project the queries into the latent space and the attention output back out of it ("absorbed" form). The two
forms are the same matmul, associated differently.

Shapes: B batch, T tokens, S keys (the T tokens, or the slots of the cache), D residual stream, N heads, R latent, H
size of a query and key: F without RoPE and P with it, V size of a value, Q query rank, I indexer head.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from maxhydra.config.schema import model as config
from maxhydra.kernels.attention.context import choose_strategy, whole_key_spec
from maxhydra.kernels.attention.spec import Request, TokenInfo, visible
from maxhydra.layers.attention import attend, write_cache
from maxhydra.layers.attention_heads import QueryTemperature, scale_queries
from maxhydra.layers.context import Context, KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.indexer import Indexer, IndexerSpec
from maxhydra.layers.interfaces import AuxOutputs, MixerOutput, visible_keys
from maxhydra.layers.kv_cache import Cache, CacheSpec, KeysValues
from maxhydra.layers.linear import Linear
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.qk_clip import HEAD_LOGITS, clip_factors, clip_latent_heads
from maxhydra.layers.rope import Rotation, rotate
from maxhydra.layers.statistics import largest_logits, logit_statistics

# Epsilon of the latent norms, independent of the model's.
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class MlaSpec:
    """Sizes and options of MLA in one layer kind, resolved from the config."""

    emb_dim: int
    num_heads: int
    query_rank: int | None
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rotation: Rotation | None
    temperature: QueryTemperature | None
    indexer: IndexerSpec | None
    indexer_of: str | None
    """Kind whose latest layer selects the keys; None without a shared indexer."""
    selects_for_others: bool
    """Whether layers of another kind attend to the keys that this one selects."""
    top_k: int | None
    """Keys that a query attends to; None: all."""
    qk_clip: float | None
    kernel: KernelChoice
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "MlaSpec":
        section = kind.mla
        source = kind if section.indexer_of is None else model.kinds[section.indexer_of]
        sources = [other.mla.indexer_of for other in model.kinds.values()]
        plain_dim = section.qk_nope_head_dim or model.head_dim
        return cls(
            emb_dim=model.emb_dim,
            num_heads=model.num_heads,
            query_rank=section.q_lora_rank,
            latent_dim=section.kv_lora_rank,
            plain_dim=plain_dim,
            rope_dim=section.qk_rope_head_dim,
            value_dim=section.v_head_dim or model.head_dim,
            scale=_logit_scale(section) * (plain_dim + section.qk_rope_head_dim) ** -0.5,
            rotation=Rotation.of(section.rope, section.qk_rope_head_dim),
            temperature=QueryTemperature.of(section.temperature),
            indexer=IndexerSpec.of(model, kind),
            indexer_of=section.indexer_of,
            selects_for_others=any(model.kinds[name] is kind for name in sources if name is not None),
            top_k=source.mla.indexer.top_k,
            qk_clip=model.qk_clip,
            kernel=KernelChoice(model.kernels.attention.value, model.kernels.sizes("attention")),
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    def build(self, make: ParamBuilder) -> "Mla":
        return Mla(self, make)

    def apply_aux_updates(self, new: Any, aux: AuxOutputs) -> Any:
        """The weights after an optimizer step, with large attention logits clipped (qk_clip.py)."""
        assert self.qk_clip is not None
        sizes = {"plain_dim": self.plain_dim, "rope_dim": self.rope_dim, "value_dim": self.value_dim}
        return clip_latent_heads(new, clip_factors(aux[HEAD_LOGITS], self.qk_clip), **sizes)

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token in the form with keys and values, over the keys that a token attends to."""
        queries = self.num_heads * self.key_dim
        weights = self.emb_dim * (self.latent_dim + self.rope_dim + self.num_heads * self.value_dim)
        weights += self.latent_dim * self.num_heads * (self.plain_dim + self.value_dim)
        weights += self.emb_dim * queries if self.query_rank is None else self.query_rank * (self.emb_dim + queries)
        attention = 2.0 * self.num_heads * (self.key_dim + self.value_dim) * visible_keys(self.top_k, seq_len)
        return 2.0 * weights + attention + (0.0 if self.indexer is None else self.indexer.forward_flops(seq_len))


class Selection(NamedTuple):
    """The keys that queries attend to; without any field, all."""

    mask_BTS: jax.Array | None = None
    """For several queries per row."""
    indices_BK: jax.Array | None = None
    """For one query per row."""


class LatentCacheView(NamedTuple):
    """Latents and keys to attend to."""

    latent_BSR: jax.Array
    key_BSP: jax.Array
    """The rotated part of the key, shared by all heads."""
    index_BSI: jax.Array | None
    """Keys of the indexer."""
    tokens: TokenInfo

    def select(self, selection: Selection) -> "LatentCacheView":
        """Only the selected keys: gathered for one query per row, masked for several."""
        indices_BK = selection.indices_BK
        if indices_BK is None:
            return self._replace(tokens=self.tokens._replace(selected_BTS=selection.mask_BTS))
        assert self.tokens.kv_positions_BS is not None
        latent_BKR, key_BKP = (
            jnp.take_along_axis(x_BSH, indices_BK[:, :, None], axis=1) for x_BSH in (self.latent_BSR, self.key_BSP)
        )
        positions_BK = jnp.take_along_axis(self.tokens.kv_positions_BS, indices_BK, axis=1)
        return LatentCacheView(latent_BKR, key_BKP, None, self.tokens._replace(kv_positions_BS=positions_BK))


class Mla(nnx.Module):
    """out(attention([query, rope(query)], [key(c), rope(key)], value(c))) with the latent c = norm(latent(x))."""

    def __init__(self, spec: MlaSpec, make: ParamBuilder):
        self.spec = spec
        D, N, R, Q = spec.emb_dim, spec.num_heads, spec.latent_dim, spec.query_rank
        scale = spec.init_scale

        def norm(dim: int) -> RMSNorm:
            return RMSNorm(dim, eps=NORM_EPS, dtypes=spec.dtypes, make=make)

        def down(name: str, dim: int) -> Linear:
            return make.projection(name, (D,), (dim,), ("embed", "latent"), scale=scale)

        def up(name: str, dim: int, width: int, axis: str) -> Linear:
            return make.projection(name, (dim,), (N, width), (axis, "heads", "head_dim"), scale=scale)

        self.query = None if Q is not None else up("query", D, spec.key_dim, "embed")
        self.query_down = None if Q is None else down("query_down", Q)
        self.query_norm = None if Q is None else norm(Q)
        self.query_up = None if Q is None else up("query_up", Q, spec.key_dim, "latent")
        self.latent = down("latent", R + spec.rope_dim)
        self.latent_norm = norm(R)
        self.key_value = up("key_value", R, spec.plain_dim + spec.value_dim, "latent")
        self.out = make.projection(
            "out", (N, spec.value_dim), (D,), ("heads", "head_dim", "embed"), scale=spec.out_scale
        )
        self.indexer = None if spec.indexer is None else Indexer(spec.indexer, make.below("indexer"))

    @jax.named_scope("mla")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        q_BTNH, low_rank_BTQ = self._queries(x_BTD, ctx)
        view, cache = self._update_cache(x_BTD, ctx)
        aux: AuxOutputs = {}
        statistics: AuxOutputs = {}
        selection = Selection() if self.spec.indexer_of is None else ctx.shared[self.spec.indexer_of]
        if self.indexer is not None and view.index_BSI is not None:
            visible_BTS = self._visible(view, q_BTNH.shape[1])
            scores_BTS = self.indexer(x_BTD, low_rank_BTQ, view.index_BSI, visible_BTS, ctx)
            selection = _best_keys(scores_BTS, self.indexer.spec.top_k)
        view = view.select(selection)
        if self._is_absorbed(q_BTNH.shape[1], ctx):
            attended_BTNV = self._attend_latents(q_BTNH, view, ctx)
        else:
            k_BSNH, v_BSNV = self._keys_values(view, ctx)
            attended_BTNV = self._attend(q_BTNH, k_BSNH, v_BSNV, view, ctx)
            statistics = self._statistics(q_BTNH, k_BSNH, view, ctx)
            if self.indexer is not None and ctx.cache is None:
                attended_BTS = self._visible(view, q_BTNH.shape[1]) & ctx.is_real_BT[:, :, None]
                aux = self.indexer.aux_loss(scores_BTS, q_BTNH, k_BSNH, attended_BTS, scale=self.spec.scale)
        attended_BTNV = ctx.constrain(attended_BTNV, "act_batch", "act_length", "act_heads", None)
        out_BTD = self.out(checkpoint_name(attended_BTNV, "context"), ctx)
        out_BTD = ctx.to_stream(out_BTD)
        shared = selection if self.spec.selects_for_others else None
        return MixerOutput(checkpoint_name(out_BTD, "attention_out"), cache, aux | statistics, shared)

    def _statistics(self, q_BTNH: jax.Array, k_BSNH: jax.Array, view: LatentCacheView, ctx: Context) -> AuxOutputs:
        arrays, selected_BTS = (q_BTNH, k_BSNH, self._request, ctx), view.tokens.selected_BTS
        found = logit_statistics(*arrays, segments_BT=ctx.segments, selected_BTS=selected_BTS)
        if self.spec.qk_clip is not None and ctx.cache is None:
            found[HEAD_LOGITS] = largest_logits(*arrays, segments_BT=ctx.segments, selected_BTS=selected_BTS)
        return found

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        """Latents are cached as values, since attention sums over them, and rotated and indexer keys as keys."""
        spec = self.spec
        index_dim = 0 if spec.indexer is None else spec.indexer.head_dim
        return cache_spec.keys_and_values(
            layers=layers,
            kv_heads=1,
            head_dim=spec.rope_dim + index_dim,
            value_dim=spec.latent_dim,
            dtype=spec.dtypes.compute,
        )

    def _queries(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Queries, and the low-rank vectors they are projected from; x itself if queries have no low rank."""
        if self.query is not None:
            low_rank_BTQ, q_BTNH = x_BTD, self.query(x_BTD, ctx)
        else:
            assert self.query_down is not None and self.query_norm is not None and self.query_up is not None
            low_rank_BTQ = self.query_norm(self.query_down(x_BTD, ctx))
            q_BTNH = self.query_up(low_rank_BTQ, ctx)
        plain_BTNF, rotary_BTNP = jnp.split(q_BTNH, [self.spec.plain_dim], axis=-1)
        q_BTNH = jnp.concatenate([plain_BTNF, self._rotate(rotary_BTNP, ctx)], axis=-1)
        q_BTNH = scale_queries(q_BTNH, ctx.positions, self.spec.temperature)
        q_BTNH = ctx.constrain(q_BTNH, "act_batch", "act_length", "act_heads", None)
        return checkpoint_name(q_BTNH, "query"), low_rank_BTQ

    def _update_cache(self, x_BTD: jax.Array, ctx: Context) -> tuple[LatentCacheView, Any]:
        """The latents and keys to attend to, and the cache with those of this call."""
        # Every device computes the latents of all its tokens; the compiler would split and gather them over `tensor`.
        both_BTR = ctx.constrain(self.latent(x_BTD, ctx), "act_batch", "act_length", None)
        latent_BTR, key_BTP = jnp.split(both_BTR, [self.spec.latent_dim], axis=-1)
        latent_BTR = self.latent_norm(latent_BTR)
        key_BTP = self._rotate(key_BTP[:, :, None], ctx)[:, :, 0]
        index_BTI = None if self.indexer is None else self.indexer.keys(x_BTD, ctx)
        if ctx.cache is None:
            tokens = TokenInfo(ctx.segments, ctx.segments, None, None)
            if not self._has_split_keys(ctx):
                latent_BTR, key_BTP, index_BTI = (_unsplit(x, ctx) for x in (latent_BTR, key_BTP, index_BTI))
            return LatentCacheView(latent_BTR, key_BTP, index_BTI, tokens), None
        keys_BTH = key_BTP if index_BTI is None else jnp.concatenate([key_BTP, index_BTI], axis=-1)
        cache = write_cache(keys_BTH[:, :, None], latent_BTR[:, :, None], ctx)
        cached: KeysValues = cache.read(ctx.rows, self.spec.dtypes.compute)
        key_BSP, index_BSI = jnp.split(cached.key_BSKH[:, :, 0], [self.spec.rope_dim], axis=-1)
        tokens = TokenInfo(None, None, ctx.cached_positions_BT, cached.positions_BS)
        return LatentCacheView(cached.value_BSKH[:, :, 0], key_BSP, index_BSI, tokens), cache

    def _strategy(self, ctx: Context) -> str | None:
        """Strategy for sequences that are sharded along their length; None: they are not sharded."""
        if not ctx.is_length_split:
            return None
        has_selection = self.spec.top_k is not None
        with kernel_errors_as_config_errors():
            return choose_strategy(ctx.place, self._request, num_heads=self.spec.num_heads, has_selection=has_selection)

    def _has_split_keys(self, ctx: Context) -> bool:
        """Whether keys and values stay split along the sequence until attention; otherwise the latents are gathered.

        By ulysses, if that sends less. Latents are gathered for the keys, again for the gradient of their kernel, and
        their gradient is scattered; heads are exchanged once in each direction.
        """
        strategy = self._strategy(ctx)
        if strategy != "ulysses":
            return strategy == "ring"
        latents = 3 * (self.spec.latent_dim + self.spec.rope_dim) * ctx.place.num_shards("length")
        heads = 2 * self.spec.num_heads * (self.spec.key_dim + self.spec.value_dim) / ctx.place.num_shards("heads")
        return heads < latents

    def _rotate(self, x_BTNP: jax.Array, ctx: Context) -> jax.Array:
        """Apply RoPE."""
        return x_BTNP if self.spec.rotation is None else rotate(x_BTNP, ctx.positions, self.spec.rotation)

    def _is_absorbed(self, queries: int, ctx: Context) -> bool:
        """Whether the absorbed form takes fewer FLOPs than projecting keys and values, for this many queries."""
        projected = self.spec.plain_dim + self.spec.value_dim
        return (
            ctx.cache is not None
            and queries * (2 * self.spec.latent_dim - projected) < self.spec.latent_dim * projected
        )

    def _keys_values(self, view: LatentCacheView, ctx: Context) -> tuple[jax.Array, jax.Array]:
        # Otherwise the compiler gathers the gradients of all heads for the kernel gradient in its stored sharding.
        has_whole_heads = self._strategy(ctx) == "ulysses" and not self._has_split_keys(ctx)
        sharding = self._whole_key_sharding(ctx, None) if has_whole_heads else None
        both_BSNH = self._place_keys(self.key_value(view.latent_BSR, ctx, sharding), ctx)
        plain_BSNF, v_BSNV = jnp.split(both_BSNH, [self.spec.plain_dim], axis=-1)
        shared_BSNP = jnp.broadcast_to(view.key_BSP[:, :, None], (*plain_BSNF.shape[:3], self.spec.rope_dim))
        k_BSNH = jnp.concatenate([plain_BSNF, shared_BSNP], axis=-1)
        return (
            checkpoint_name(self._place_keys(k_BSNH, ctx), "key"),
            checkpoint_name(self._place_keys(v_BSNV, ctx), "value"),
        )

    def _place_keys(self, x_BSNH: jax.Array, ctx: Context) -> jax.Array:
        """Keys or values where attention takes them; with ulysses and gathered latents, only the heads of a device."""
        is_split = self._has_split_keys(ctx)
        if self._strategy(ctx) == "ulysses" and not is_split:
            return jax.lax.with_sharding_constraint(
                x_BSNH, self._whole_key_sharding(ctx, *whole_key_spec(ctx.place)[:2])
            )
        return ctx.constrain(x_BSNH, "act_batch", "act_length" if is_split else None, "act_heads", None)

    def _whole_key_sharding(self, ctx: Context, *before: Any) -> NamedSharding:
        """Sharding over the heads that a device attends to; `before`: of the dimensions before the heads."""
        return NamedSharding(ctx.sharder.mesh, PartitionSpec(*before, whole_key_spec(ctx.place)[2]))

    def _attend_latents(self, q_BTNH: jax.Array, view: LatentCacheView, ctx: Context) -> jax.Array:
        """The absorbed form: every head attends to the latents, used as both keys and values."""
        key_RNF, value_RNV = jnp.split(self.key_value.matrix(ctx), [self.spec.plain_dim], axis=-1)
        plain_BTNF, rotary_BTNP = jnp.split(q_BTNH, [self.spec.plain_dim], axis=-1)
        latent_BTNR = jnp.einsum("BTNF,RNF->BTNR", plain_BTNF, key_RNF)
        queries = jnp.concatenate([latent_BTNR, rotary_BTNP], axis=-1)
        keys = jnp.concatenate([view.latent_BSR, view.key_BSP], axis=-1)[:, :, None]
        mixed_BTNR = self._attend(queries, keys, view.latent_BSR[:, :, None], view, ctx)
        return jnp.einsum("BTNR,RNV->BTNV", mixed_BTNR, value_RNV)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, view: LatentCacheView, ctx: Context) -> jax.Array:
        is_gathered = self._strategy(ctx) is not None and not self._has_split_keys(ctx)
        options: dict[str, Any] = {"kernel": self.spec.kernel, "has_whole_keys": is_gathered, **view.tokens._asdict()}
        return attend(q, k, v, self._request, ctx, **options)

    def _visible(self, view: LatentCacheView, queries: int) -> jax.Array:
        mask = visible(self._request, view.tokens, queries=range(queries), keys=range(view.latent_BSR.shape[1]))
        assert mask is not None
        return mask

    @property
    def _request(self) -> Request:
        return Request(
            scale=self.spec.scale,
            causal=True,
            window=None,
            chunk=None,
            softcap=None,
            softmax_dtype=self.spec.dtypes.softmax.name,
        )


def _best_keys(scores_BTS: jax.Array, top_k: int) -> Selection:
    """The keys with the highest scores of each query."""
    if scores_BTS.shape[2] <= top_k:
        return Selection()
    best_BTK, indices_BTK = jax.lax.top_k(scores_BTS, top_k)
    if scores_BTS.shape[1] == 1:
        return Selection(indices_BK=indices_BTK[:, 0])
    return Selection(mask_BTS=scores_BTS >= best_BTK[:, :, -1:])


def _logit_scale(mla: config.Mla) -> float:
    """YaRN's factor on attention logits; 1 without mscale or context extension."""
    if mla.mscale is None or mla.rope.factor is None:
        return 1.0
    return (0.1 * mla.mscale * math.log(max(mla.rope.factor, 1.0)) + 1) ** 2


def _unsplit(x_BSH: jax.Array | None, ctx: Context) -> Any:
    """Latents or keys of whole sequences on each device: only queries are split along the sequence."""
    if x_BSH is None:
        return None
    return ctx.sharder.reshard(x_BSH, ("act_batch", None, None), gradient=("act_batch", "act_length", None))
