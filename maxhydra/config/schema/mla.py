"""Schema of multi-head latent attention, which caches one compressed vector per token."""

from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.rope import Rope, RopeKind


@schema
class Indexer(Schema):
    """Sparse attention (DeepSeek-V3.2, 2025): indexer heads score earlier tokens, attention uses the top_k."""

    top_k: int | None = option(None, ge=1)
    """Tokens that a query attends to. null: no indexer, all earlier tokens. With train.seq_len or more, attention is
    dense, which is used to warm up an indexer."""
    num_heads: int = option(64, ge=1)
    """Heads of the indexer."""
    head_dim: int = option(128, ge=2)
    """Head dimension of the indexer; RoPE is applied to its first qk_rope_head_dim dimensions."""
    loss_weight: float = option(1.0, ge=0)
    """Weight of the indexer loss, the mean over tokens of KL(attention summed over heads || softmax of the scores).
    Only this loss trains the indexer, and it trains nothing else."""


@schema
class Mla(Schema):
    """Multi-head latent attention (DeepSeek-V2, 2024), with model.num_heads heads for queries, keys and values."""

    q_lora_rank: int | None = option(None, ge=1)
    """Rank of the compressed queries. null: queries are projected directly from the residual stream."""
    kv_lora_rank: int = option(512, ge=1)
    """Dimension of the latent vector from which keys and values of all heads are projected."""
    qk_nope_head_dim: int | None = option(None, ge=1)
    """Dimensions of queries and keys without RoPE. null: model.head_dim."""
    qk_rope_head_dim: int = option(64, ge=2)
    """Dimensions of queries and keys with RoPE; this part of the key is shared by all heads."""
    v_head_dim: int | None = option(None, ge=1)
    """Dimension of values. null: model.head_dim."""
    mscale: float | None = option(None, gt=0)
    """rope.kind=yarn: multiply attention logits, in addition to 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim), by
    (0.1 * mscale * ln(rope.factor) + 1)^2. null: no extra factor."""
    rope: Rope = section(Rope)
    indexer: Indexer = section(Indexer)

    def check(self) -> Iterator[Problem]:
        if self.qk_rope_head_dim % 2:
            yield Problem(
                "qk_rope_head_dim",
                "is odd, but RoPE rotates pairs",
                value=self.qk_rope_head_dim,
                accepted="an even number",
            )
        if self.mscale is not None and self.rope.kind is not RopeKind.yarn:
            hint = "set rope.kind=yarn, or leave this null"
            yield Problem("mscale", f"is not used by rope.kind={self.rope.kind.value}", value=self.mscale, hint=hint)
        if self.indexer.top_k is None:
            return
        if self.q_lora_rank is None:
            hint = "set it, or leave indexer.top_k null"
            yield Problem(
                "q_lora_rank", "is required by the indexer, whose queries are projected from it", value=None, hint=hint
            )
        if self.indexer.head_dim < self.qk_rope_head_dim:
            yield Problem(
                "indexer.head_dim",
                f"is smaller than qk_rope_head_dim={self.qk_rope_head_dim}",
                value=self.indexer.head_dim,
                accepted=f"{self.qk_rope_head_dim} or more",
            )
