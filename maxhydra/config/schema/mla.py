"""Latent attention as data: what all heads need of a token is kept as one small vector."""

from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.rope import Rope, RopeKind


@schema
class Indexer(Schema):
    """Sparse attention (DeepSeek-V3.2, 2025): small heads score all earlier tokens, attention looks at the best."""

    top_k: int | None = option(None, ge=1)
    """Tokens that a query looks at. null: no indexer, all before it. From train.seq_len on nothing is left out, which
    is how an indexer is warmed up."""
    num_heads: int = option(64, ge=1)
    """Heads of the indexer."""
    head_dim: int = option(128, ge=2)
    """Size of such a head; its first qk_rope_head_dim numbers carry the position."""
    loss_weight: float = option(1.0, ge=0)
    """Training adds this times the mean over tokens of KL(attention, summed over heads || softmax of the scores). It
    trains the indexer alone, and nothing else does."""


@schema
class Mla(Schema):
    """Multi-head latent attention (DeepSeek-V2, 2024); the model's num_heads, and kv heads are as many."""

    q_lora_rank: int | None = option(None, ge=1)
    """Size of the vector that queries are made from. null: straight from the residual stream."""
    kv_lora_rank: int = option(512, ge=1)
    """Size of the latent, from which keys and values of all heads are made."""
    qk_nope_head_dim: int | None = option(None, ge=1)
    """Part of a query and key that carries no position. null: the model's head_dim."""
    qk_rope_head_dim: int = option(64, ge=2)
    """Part of a query and key that carries the position; all heads share that of the key."""
    v_head_dim: int | None = option(None, ge=1)
    """Size of a value. null: the model's head_dim."""
    mscale: float | None = option(None, gt=0)
    """rope.kind=yarn: logits, divided by sqrt(qk_nope_head_dim + qk_rope_head_dim), grow by (0.1 * mscale *
    ln(rope.factor) + 1)^2. null: they do not."""
    rope: Rope = section(Rope)
    indexer: Indexer = section(Indexer)

    def check(self) -> Iterator[Problem]:
        if self.qk_rope_head_dim % 2:
            yield Problem(
                "qk_rope_head_dim",
                "is odd; rotary positions turn pairs",
                value=self.qk_rope_head_dim,
                accepted="an even number",
            )
        if self.mscale is not None and self.rope.kind is not RopeKind.yarn:
            hint = "set rope.kind=yarn or leave it null"
            yield Problem("mscale", f"is not used by rope.kind={self.rope.kind.value}", value=self.mscale, hint=hint)
        if self.indexer.top_k is None:
            return
        if self.q_lora_rank is None:
            hint = "set it, or leave indexer.top_k null"
            yield Problem("q_lora_rank", "is what the indexer's queries are made from", value=None, hint=hint)
        if self.indexer.head_dim < self.qk_rope_head_dim:
            yield Problem(
                "indexer.head_dim",
                f"is less than qk_rope_head_dim={self.qk_rope_head_dim}, which it holds",
                value=self.indexer.head_dim,
                accepted=f"{self.qk_rope_head_dim} or more",
            )
