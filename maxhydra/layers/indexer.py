"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2, 2025), which selects the keys that a query attends to.

The score of key s for query t is sum_n weight[t, n] * relu(q[t, n] . k[s]), over small heads n that share a key. It is
trained to imitate the attention weights; gradients do not flow from it into the rest of the model.

Shapes: B batch, T queries, S keys, D residual stream, Q query rank, N heads, I size of a head.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.compressed import CompressedAttention
from maxhydra.layers.context import Context
from maxhydra.layers.interfaces import AuxOutputs, visible_keys
from maxhydra.layers.linear import Linear
from maxhydra.layers.norm import LayerNorm
from maxhydra.layers.params import Dtypes, ParamBuilder
from maxhydra.layers.rope import Rotation, rotate

NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class IndexerSpec:
    """Sizes of the indexer, resolved from the config."""

    emb_dim: int
    query_rank: int
    num_heads: int
    head_dim: int
    rotation: Rotation | None
    """RoPE of the first part of a head, whose pairs need not be those of attention."""
    top_k: int
    loss_weight: float
    init_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "IndexerSpec | None":
        """None for dense attention."""
        section: config.Mla | CompressedAttention = kind.mla
        rotated_dim = kind.mla.qk_rope_head_dim
        if kind.mixer is config.Mixer.compressed:
            section, rotated_dim = kind.compressed, model.head_dim
        indexer = section.indexer
        if indexer.top_k is None:
            return None
        assert section.q_lora_rank is not None
        return cls(
            emb_dim=model.emb_dim,
            query_rank=section.q_lora_rank,
            num_heads=indexer.num_heads,
            head_dim=indexer.head_dim,
            rotation=Rotation.of(dataclasses.replace(section.rope, pairs=indexer.pairs), rotated_dim),
            top_k=indexer.top_k,
            loss_weight=indexer.loss_weight,
            init_scale=model.init_scale,
            dtypes=Dtypes.of(model.dtypes),
        )

    def forward_flops(self, seq_len: int) -> float:
        weights = self.query_rank * self.num_heads * self.head_dim + self.emb_dim * (self.head_dim + self.num_heads)
        return 2.0 * weights + 2.0 * self.num_heads * self.head_dim * visible_keys(None, seq_len)


class KeyScorer(nnx.Module):
    """Scores of keys for queries, and the loss that trains them."""

    spec: IndexerSpec
    query: Linear
    weight: Linear

    @jax.named_scope("indexer")
    def __call__(
        self,
        x_BTD: jax.Array,
        low_rank_BTQ: jax.Array,
        key_BSI: jax.Array,
        visible_BTS: jax.Array,
        ctx: Context,
    ) -> jax.Array:
        """Scores [B, T, S] in float32, -inf for keys that are not visible.

        With several queries the heads are summed in a scan, so no array [B, T, N, S] is allocated.
        """
        q_BTNI = self.rotate_heads(self.query(jax.lax.stop_gradient(low_rank_BTQ), ctx), ctx)
        weight_BTN = self.weight(jax.lax.stop_gradient(x_BTD), ctx).astype(jnp.float32)
        weight_BTN = weight_BTN * (self.spec.num_heads * self.spec.head_dim) ** -0.5
        if q_BTNI.shape[1] == 1:
            scores_BTS = _scores(q_BTNI, weight_BTN, key_BSI)
        else:
            heads = (jnp.moveaxis(q_BTNI, 2, 0)[:, :, :, None], jnp.moveaxis(weight_BTN, 2, 0)[..., None])
            term = jax.checkpoint(_scores)

            def add(total_BTS: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                return total_BTS + term(*head, key_BSI), None

            zeros = jnp.zeros((*q_BTNI.shape[:2], key_BSI.shape[1]), jnp.float32)
            scores_BTS = jax.lax.scan(add, zeros, heads)[0]
        return jnp.where(visible_BTS, scores_BTS, -jnp.inf)

    def aux_loss(
        self, scores_BTS: jax.Array, q_BTNH: jax.Array, k_BSNH: jax.Array, visible_BTS: jax.Array, *, scale: float
    ) -> AuxOutputs:
        """The aux loss KL(p || softmax(scores)), p the mean attention weights of all heads over the attended keys.

        Empty if the loss has no weight.
        """
        if not self.spec.loss_weight:
            return {}
        queries, keys = jax.lax.stop_gradient((q_BTNH, k_BSNH))
        p_BTS = _attention(queries, keys, visible_BTS, scale)
        has_keys_BT = jnp.any(visible_BTS, axis=-1)
        # Queries without visible keys (padding) must stay finite, or their gradients would be NaN.
        log_q_BTS = jax.nn.log_softmax(jnp.where(visible_BTS, scores_BTS, MASKED), axis=-1)
        log_p_BTS = jnp.log(jnp.where(p_BTS > 0, p_BTS, 1.0))
        kl_BT = jnp.sum(p_BTS * (log_p_BTS - jnp.where(p_BTS > 0, log_q_BTS, 0.0)), axis=-1)
        total = jnp.sum(jnp.where(has_keys_BT, kl_BT, 0.0))
        return {"loss_sum": self.spec.loss_weight * total, "tokens": jnp.sum(has_keys_BT, dtype=jnp.float32)}

    def rotate_heads(self, x_BTNI: jax.Array, ctx: Context) -> jax.Array:
        """Apply RoPE."""
        return x_BTNI if self.spec.rotation is None else rotate(x_BTNI, ctx.positions, self.spec.rotation)


class Indexer(KeyScorer):
    """The scores of tokens."""

    def __init__(self, spec: IndexerSpec, make: ParamBuilder):
        self.spec = spec
        D, N, I, scale = spec.emb_dim, spec.num_heads, spec.head_dim, spec.init_scale
        self.query = make.projection("query", (spec.query_rank,), (N, I), ("latent", None, "head_dim"), scale=scale)
        self.key = make.projection("key", (D,), (I,), ("embed", "head_dim"), scale=scale)
        self.key_norm = LayerNorm(I, eps=NORM_EPS, dtypes=spec.dtypes, make=make)
        self.weight = make.projection("weight", (D,), (N,), ("embed", None), scale=scale)

    def keys(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """Indexer keys of the tokens, [B, T, I]."""
        key_BTI = self.key_norm(self.key(jax.lax.stop_gradient(x_BTD), ctx))
        return self.rotate_heads(key_BTI[:, :, None], ctx)[:, :, 0]


# A finite logit with zero softmax weight.
MASKED = -1e30


def _scores(q_BTNI: jax.Array, weight_BTN: jax.Array, key_BSI: jax.Array) -> jax.Array:
    """sum_n weight * relu(q . k), in float32."""
    dots = jnp.einsum("BTNI,BSI->BTNS", q_BTNI, key_BSI, preferred_element_type=jnp.float32)
    return jnp.einsum("BTNS,BTN->BTS", jax.nn.relu(dots), weight_BTN)


def _attention(q_BTNH: jax.Array, k_BSNH: jax.Array, visible_BTS: jax.Array, scale: float) -> jax.Array:
    """Mean attention weights over heads, one head at a time; zeros for a query without visible keys.

    Keys may have one head that all queries share.
    """
    shared_BSH = k_BSNH[:, :, 0] if k_BSNH.shape[2] == 1 else None

    def add(total_BTS: jax.Array, head: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, None]:
        q_BTH, k_BSH = head[0], head[1] if shared_BSH is None else shared_BSH
        logits_BTS = jnp.einsum("BTH,BSH->BTS", q_BTH, k_BSH, preferred_element_type=jnp.float32) * scale
        return total_BTS + jax.nn.softmax(logits_BTS, axis=-1, where=visible_BTS), None

    heads = (jnp.moveaxis(q_BTNH, 2, 0), None if shared_BSH is not None else jnp.moveaxis(k_BSNH, 2, 0))
    shape = (*q_BTNH.shape[:2], k_BSNH.shape[1])
    return jax.lax.scan(add, jnp.zeros(shape, jnp.float32), heads)[0] / q_BTNH.shape[2]
