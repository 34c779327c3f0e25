"""Compressed attention (DeepSeek-V4, 2026): a sliding window of tokens, and compressed entries of all earlier ones.

All heads share one vector per token or entry, which is key and value alike. It is rotated by its position, and the
attention output is rotated back by the position of the query, so that values depend on relative positions only. An
indexer may select the entries that a query attends to. Heads are projected to the residual stream in two steps, of
which the first is block-diagonal over groups of heads.

The cache holds the last tokens of the window, those that later entries sum, and the entries.

B batch, T tokens, P earlier tokens, S keys in the window, W entries, D residual stream, N heads, H head size, Q query
rank, I indexer head, G groups of heads, F features of a group, R rank of a group.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.kernels.attention.spec import Request, TokenInfo, visible
from maxhydra.kernels.rms_norm.reference import unit_rms
from maxhydra.layers.attention import attend
from maxhydra.layers.compressor import Compressor, CompressorSpec, Groups, find_groups
from maxhydra.layers.context import Context, KernelChoice
from maxhydra.layers.indexer import IndexerSpec, KeyScorer
from maxhydra.layers.interfaces import AuxOutputs, MixerOutput, visible_keys
from maxhydra.layers.kv_cache import Cache, CacheSpec, JointCache, StateSpec
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.rope import Rotation, rotate_last
from maxhydra.layers.short_convolution import last_tokens, stored_states


@dataclasses.dataclass(frozen=True)
class CompressedSpec:
    """Sizes and options of compressed attention in one layer kind, resolved from the config."""

    emb_dim: int
    num_heads: int
    head_dim: int
    query_rank: int
    window: int
    groups: int
    group_rank: int
    rotation: Rotation
    compressor: CompressorSpec | None
    """None without entries."""
    indexer: IndexerSpec | None
    norm_eps: float
    kernel: KernelChoice
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "CompressedSpec":
        section, dtypes = kind.compressed, Dtypes.of(model.dtypes)
        rotation = Rotation.of(section.rope, model.head_dim)
        assert rotation is not None
        compressor = None
        if section.rate is not None:
            compressor = CompressorSpec(
                emb_dim=model.emb_dim,
                head_dim=model.head_dim,
                rate=section.rate,
                has_overlap=section.overlap,
                rotation=rotation,
                norm_eps=model.norm_eps,
                init_scale=model.init_scale,
                dtypes=dtypes,
            )
        return cls(
            emb_dim=model.emb_dim,
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            query_rank=section.q_lora_rank,
            window=section.window,
            groups=section.out_groups,
            group_rank=section.out_rank,
            rotation=rotation,
            compressor=compressor,
            indexer=IndexerSpec.of(model, kind),
            norm_eps=model.norm_eps,
            kernel=KernelChoice(model.kernels.attention.value, model.kernels.sizes("attention")),
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=dtypes,
        )

    @property
    def index_compressor(self) -> CompressorSpec | None:
        """The compressor of the indexer's keys; None without an indexer."""
        if self.compressor is None or self.indexer is None:
            return None
        assert self.indexer.rotation is not None
        sizes: Any = {"head_dim": self.indexer.head_dim, "rotation": self.indexer.rotation}
        return dataclasses.replace(self.compressor, **sizes)

    def build(self, make: ParamBuilder) -> "CompressedAttention":
        return CompressedAttention(self, make)

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token: projections, and attention to the window and the selected entries."""
        D, heads = self.emb_dim, self.num_heads * self.head_dim
        weights = self.query_rank * (D + heads) + D * self.head_dim + self.group_rank * (heads + self.groups * D)
        keys, extra = visible_keys(self.window, seq_len), 0.0
        if self.compressor is not None:
            entries = seq_len // self.compressor.rate
            top_k = None if self.indexer is None else self.indexer.top_k
            keys += visible_keys(top_k, entries) if entries else 0
            extra = self.compressor.forward_flops()
        if self.index_compressor is not None and self.indexer is not None:
            N, I = self.indexer.num_heads, self.indexer.head_dim
            scores = N * I * (visible_keys(None, entries) if entries else 0)
            extra += self.index_compressor.forward_flops() + 2.0 * (self.query_rank * N * I + D * N + scores)
        return 2.0 * weights + 2.0 * self.num_heads * 2 * self.head_dim * keys + extra


class EntryIndexer(KeyScorer):
    """The scores of entries, whose keys are compressed like the entries themselves."""

    def __init__(self, spec: IndexerSpec, compressor: CompressorSpec, make: ParamBuilder):
        self.spec = spec
        N, I, scale = spec.num_heads, spec.head_dim, spec.init_scale
        self.query = make.projection("query", (spec.query_rank,), (N, I), ("latent", None, "head_dim"), scale=scale)
        self.weight = make.projection("weight", (spec.emb_dim,), (N,), ("embed", None), scale=scale)
        self.compressor = Compressor(compressor, make.below("compressor"))

    def rotate_heads(self, x_BTNI: jax.Array, ctx: Context) -> jax.Array:
        assert self.spec.rotation is not None
        return rotate_last(x_BTNI, ctx.positions, self.spec.rotation)


class Entries(NamedTuple):
    """The entries that queries may attend to."""

    entry_BWH: jax.Array
    index_BWI: jax.Array | None
    """Keys of the indexer."""
    visible_BTW: jax.Array


class CompressedAttention(nnx.Module):
    """out(group(attention(norm(query(x)), [window, entries]))), with keys and values norm(key(x))."""

    def __init__(self, spec: CompressedSpec, make: ParamBuilder):
        self.spec = spec
        D, N, H, G, R = spec.emb_dim, spec.num_heads, spec.head_dim, spec.groups, spec.group_rank
        scale = spec.init_scale

        def norm(dim: int) -> RMSNorm:
            return RMSNorm(dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)

        self.query_down = make.projection("query_down", (D,), (spec.query_rank,), ("embed", "latent"), scale=scale)
        self.query_norm = norm(spec.query_rank)
        axes = ("latent", "heads", "head_dim")
        self.query_up = make.projection("query_up", (spec.query_rank,), (N, H), axes, scale=scale)
        self.key = make.projection("key", (D,), (H,), ("embed", "head_dim"), scale=scale)
        self.key_norm = norm(H)
        self.group = make.projection("group", (N * H // G,), (G, R), ("head_dim", "heads", "head_dim"), scale=scale)
        self.out = make.projection("out", (G, R), (D,), ("heads", "head_dim", "embed"), scale=spec.out_scale)
        self.sinks = make.zeros((N,), ("heads",))
        compressor, indexer = spec.compressor, spec.indexer
        self.compressor = None if compressor is None else Compressor(compressor, make.below("compressor"))
        index_compressor = spec.index_compressor
        self.indexer = (
            None
            if indexer is None or index_compressor is None
            else EntryIndexer(indexer, index_compressor, make.below("indexer"))
        )

    @jax.named_scope("compressed")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        _reject_split_sequences(ctx)
        states = _states(ctx)
        low_rank_BTQ = self.query_norm(self.query_down(x_BTD, ctx))
        q_BTNH = unit_rms(self.query_up(low_rank_BTQ, ctx), self.spec.norm_eps).astype(self.spec.dtypes.compute)
        q_BTNH = ctx.constrain(self._rotate(q_BTNH, ctx), "act_batch", "act_length", "act_heads", None)
        q_BTNH = checkpoint_name(q_BTNH, "query")
        key_BTH = self._rotate(self.key_norm(self.key(x_BTD, ctx))[:, :, None], ctx)[:, :, 0]
        key_BSH, visible_BTS, states["window"] = self._window(key_BTH, states.get("window"), ctx)
        entries, states, cache = self._entries(x_BTD, states, ctx)
        aux: AuxOutputs = {}
        if entries is not None:
            selected_BTW, aux = self._select(x_BTD, q_BTNH, low_rank_BTQ, entries, ctx)
            key_BSH = jnp.concatenate([key_BSH, entries.entry_BWH], axis=1)
            visible_BTS = jnp.concatenate([visible_BTS, selected_BTW], axis=2)
        attended_BTNH = self._attend(q_BTNH, checkpoint_name(key_BSH, "key"), visible_BTS, ctx)
        attended_BTNH = self._rotate(attended_BTNH, ctx, is_inverse=True)
        out_BTD = ctx.to_stream(self._project(checkpoint_name(attended_BTNH, "context"), ctx))
        if cache is not None:
            cache = JointCache({**cache.parts, "states": cache.parts["states"].write(states, ctx.rows)})
        return MixerOutput(checkpoint_name(out_BTD, "attention_out"), cache, aux)

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        """Entries and the keys of the indexer are concatenated, and cached as keys and values of about equal size."""
        spec, dtype = self.spec, self.spec.dtypes.compute
        arrays = {"window": StateSpec((spec.window - 1, spec.head_dim), dtype, (None, None))}
        for name, part in (("entries", spec.compressor), ("index", spec.index_compressor)):
            if part is not None:
                arrays[name] = StateSpec((part.tokens_before, 2 * part.width), dtype, (None, None))
        parts = {"states": cache_spec.states(layers, arrays)}
        if spec.compressor is not None:
            width = spec.head_dim + (0 if spec.indexer is None else spec.indexer.head_dim)
            sizes = {"head_dim": width // 2, "value_dim": width - width // 2}
            entries = cache_spec.every(spec.compressor.rate)
            parts["entries"] = entries.keys_and_values(layers=layers, kv_heads=1, dtype=dtype, **sizes)
        return JointCache(parts)

    def _rotate(self, x_BTNH: jax.Array, ctx: Context, *, is_inverse: bool = False) -> jax.Array:
        return rotate_last(x_BTNH, ctx.positions, self.spec.rotation, is_inverse=is_inverse)

    def _window(
        self, key_BTH: jax.Array, tail_BPH: jax.Array | None, ctx: Context
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Keys of this call and of the tokens before it, which queries see them, and the last ones for the cache."""
        T, tokens = key_BTH.shape[1], TokenInfo(ctx.segments, ctx.segments, None, None)
        if tail_BPH is not None:
            before = tail_BPH.shape[1]
            key_BTH = jnp.concatenate([tail_BPH.astype(key_BTH.dtype), key_BTH], axis=1)
            tail_BPH = last_tokens(key_BTH, ctx.segments, before)
            first_B1 = jnp.min(ctx.positions, axis=1, keepdims=True, where=ctx.is_real_BT, initial=2**30)
            earlier_BP = first_B1 + jnp.arange(-before, 0)
            own_BT = ctx.cached_positions_BT
            tokens = TokenInfo(None, None, own_BT, jnp.concatenate([earlier_BP, own_BT], axis=1))
        request = dataclasses.replace(self._request, causal=True, window=self.spec.window)
        mask_BTS = visible(request, tokens, queries=range(T), keys=range(key_BTH.shape[1]))
        assert mask_BTS is not None
        return key_BTH, jnp.broadcast_to(mask_BTS, (key_BTH.shape[0], *mask_BTS.shape[1:])), tail_BPH

    def _entries(
        self, x_BTD: jax.Array, states: dict[str, Any], ctx: Context
    ) -> tuple[Entries | None, dict[str, Any], Any]:
        """The entries of this call, or those in the cache, which include them; the updated states and the cache."""
        if self.compressor is None:
            return None, states, ctx.cache
        rate, index_BWI = self.compressor.spec.rate, None
        groups = find_groups(ctx, rate)
        entry_BWH, tail = self.compressor(x_BTD, groups, states.get("entries"), ctx)
        states = {**states, "entries": tail}
        if self.indexer is not None:
            fixed_BTD = jax.lax.stop_gradient(x_BTD)
            index_BWI, states["index"] = self.indexer.compressor(fixed_BTD, groups, states.get("index"), ctx)
        if ctx.cache is None:
            return Entries(entry_BWH, index_BWI, _visible_entries(groups, ctx)), states, None
        both_BWC = entry_BWH if index_BWI is None else jnp.concatenate([entry_BWH, index_BWI], axis=-1)
        key_BW1C, value_BW1C = jnp.split(both_BWC[:, :, None], [both_BWC.shape[-1] // 2], axis=-1)
        numbers_BW = jnp.where(groups.positions_BW < 0, -1, groups.positions_BW // rate)
        layer = ctx.cache.parts["entries"].insert(key_BW1C, value_BW1C, numbers_BW, ctx.rows)
        # Every entry up to the last token, also if none of them ends in this call.
        count_B = (jnp.max(ctx.cached_positions_BT, axis=1) + 1) // rate
        layer = dataclasses.replace(layer, length_B=count_B)
        stored = layer.read(ctx.rows, self.spec.dtypes.compute)
        # What other sequences left behind need not be finite.
        exists_BW1 = (stored.positions_BS >= 0)[:, :, None]
        all_BWC = jnp.concatenate([stored.key_BSKH, stored.value_BSKH], axis=-1)[:, :, 0]
        all_BWC = jnp.where(exists_BW1, all_BWC, 0)
        entry_BWH, index_BWI = jnp.split(all_BWC, [self.spec.head_dim], axis=-1)
        ends_BW = jnp.where(stored.positions_BS < 0, -1, (stored.positions_BS + 1) * rate - 1)
        is_visible_BTW = _visible_entries(Groups(ends_BW, ends_BW, None), dataclasses.replace(ctx, segments=None))
        entries = Entries(entry_BWH, index_BWI, is_visible_BTW)
        return entries, states, JointCache({**ctx.cache.parts, "entries": layer})

    def _select(
        self, x_BTD: jax.Array, q_BTNH: jax.Array, low_rank_BTQ: jax.Array, entries: Entries, ctx: Context
    ) -> tuple[jax.Array, AuxOutputs]:
        """[B, T, W] entries that each query attends to, and in training the loss of the indexer."""
        visible_BTW, entry_BWH = entries.visible_BTW, entries.entry_BWH
        if self.indexer is None or entries.index_BWI is None:
            return visible_BTW, {}
        scores_BTW = self.indexer(x_BTD, low_rank_BTQ, entries.index_BWI, visible_BTW, ctx)
        if scores_BTW.shape[2] > self.indexer.spec.top_k:
            least_BT1 = jax.lax.top_k(scores_BTW, self.indexer.spec.top_k)[0][:, :, -1:]
            visible_BTW = visible_BTW & (scores_BTW >= least_BT1)
        if ctx.cache is not None:
            return visible_BTW, {}
        attended_BTW = visible_BTW & ctx.is_real_BT[:, :, None]
        scale = self._request.scale
        return visible_BTW, self.indexer.aux_loss(scores_BTW, q_BTNH, entry_BWH[:, :, None], attended_BTW, scale=scale)

    def _attend(self, q_BTNH: jax.Array, key_BSH: jax.Array, visible_BTS: jax.Array, ctx: Context) -> jax.Array:
        """Attention to the vectors as keys and values; a kernel can serve a window without entries and cache."""
        key_BS1H, sinks_N = key_BSH[:, :, None], self.sinks[...]
        if self.compressor is None and ctx.cache is None:
            request, tokens = dataclasses.replace(self._request, causal=True, window=self.spec.window), ctx.segments
            segments = {"q_segments_BT": tokens, "kv_segments_BS": tokens}
            options: dict[str, Any] = {"kernel": self.spec.kernel, "sinks_N": sinks_N, **segments}
            return attend(q_BTNH, key_BS1H, key_BS1H, request, ctx, **options)
        options = {"kernel": self.spec.kernel, "sinks_N": sinks_N, "selected_BTS": visible_BTS}
        return attend(q_BTNH, key_BS1H, key_BS1H, self._request, ctx, **options)

    def _project(self, attended_BTNH: jax.Array, ctx: Context) -> jax.Array:
        """The heads of each group to its rank, and all groups to the residual stream."""
        attended_BTGF = attended_BTNH.reshape(*attended_BTNH.shape[:2], self.spec.groups, -1)
        ranks_BTGR = jnp.einsum("BTGF,FGR->BTGR", attended_BTGF, self.group.matrix(ctx))
        return self.out(ctx.constrain(ranks_BTGR, "act_batch", "act_length", "act_heads", None), ctx)

    @property
    def _request(self) -> Request:
        return Request(
            scale=self.spec.head_dim**-0.5,
            causal=False,
            window=None,
            chunk=None,
            softcap=None,
            softmax_dtype=self.spec.dtypes.softmax.name,
        )


def _states(ctx: Context) -> dict[str, Any]:
    """States of earlier tokens; empty without a cache."""
    return {} if ctx.cache is None else stored_states(dataclasses.replace(ctx, cache=ctx.cache.parts["states"]))


def _visible_entries(groups: Groups, ctx: Context) -> jax.Array:
    """[B, T, W] entries whose last token is not later than the query, in its segment."""
    ends_B1W = groups.positions_BW[:, None]
    mask_BTW = (ends_B1W >= 0) & (ends_B1W <= ctx.positions[:, :, None])
    if ctx.segments is None or groups.segments_BW is None:
        return mask_BTW
    return mask_BTW & (groups.segments_BW[:, None] == ctx.segments[:, :, None])


def _reject_split_sequences(ctx: Context) -> None:
    if ctx.is_length_split:
        reason = "is not supported by mixer=compressed, whose entries are those of whole sequences"
        value = ctx.sharder.num_shards("act_length")
        raise ConfigError(Problem("mesh.sequence", reason, value=value, accepted="1", hint="use mesh.fsdp or tensor"))
