"""Schema of grouped-query attention."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.rope import Rope


class QkNorm(Enum):
    none = "none"
    head = "head"
    head_plain = "head_plain"
    whole = "whole"


class ValueSource(Enum):
    own = "own"
    key = "key"


class AttentionBias(Enum):
    none = "none"
    qkv = "qkv"
    all = "all"


@schema
class Temperature(Schema):
    """Position-dependent query scale, which keeps attention sharp over long contexts (Nakanishi, 2025):
    1 + scale * ln(1 + floor((position + 1) / floor))."""

    floor: int | None = option(None, ge=1)
    """Number of positions that share a scale. null: queries are not scaled."""
    scale: float | None = option(None, gt=0)
    """Growth of the scale with the logarithm of the position."""

    def check(self) -> Iterator[Problem]:
        given = {"floor": self.floor, "scale": self.scale}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == 1:
            other = "scale" if missing == ["floor"] else "floor"
            yield Problem(missing[0], f"is required together with {other}", value=None, accepted="a positive number")


@schema
class Attention(Schema):
    """Grouped-query attention (Ainslie et al., 2023); multi-head and multi-query attention are special cases."""

    num_heads: int | None = option(None, ge=1)
    """Query heads of this kind. null: model.num_heads."""
    num_kv_heads: int | None = option(None, ge=1)
    """Key and value heads of this kind. null: model.num_kv_heads."""
    head_dim: int | None = option(None, ge=1)
    """Head dimension of this kind. null: model.head_dim."""
    window: int | None = option(None, ge=1)
    """Sliding window: a token attends to itself and the window - 1 tokens before it. null: to all before it."""
    chunk: int | None = option(None, ge=1)
    """Chunked attention: tokens attend only within chunks of this many tokens. null: no chunks."""
    softcap: float | None = option(None, gt=0)
    """Attention logits become softcap * tanh(logits / softcap)."""
    scale: float | None = option(None, gt=0)
    """Factor on the attention logits. null: 1 / sqrt(head_dim)."""
    sinks: bool = False
    """Add a learned logit per query head to the softmax, so that a head can attend to nothing (gpt-oss, 2025)."""
    qk_norm: QkNorm = QkNorm.none
    """Norm of queries and keys (Henry et al., 2020) before RoPE: per head with a scale (head) or without (head_plain),
    or over the whole projection (whole)."""
    bias: AttentionBias = AttentionBias.none
    """Projections with a bias: none, query, key and value (qkv), or all, including the output."""
    gated: bool = False
    """Multiply the attention output by the sigmoid of a projection of the token (Qiu et al., 2025)."""
    value: ValueSource = ValueSource.own
    """Values: a separate projection (own), or the key projection before norm and RoPE (key)."""
    value_norm: bool = False
    """Normalize the values of each head, without a scale."""
    shares: str | None = None
    """Kind of the prefix from whose last layer keys and values are taken (cross-layer sharing, Brandon et al., 2024).
    null: the layer computes its own."""
    temperature: Temperature = section(Temperature)
    rope: Rope = section(Rope)

    def check(self) -> Iterator[Problem]:
        if self.shares is not None and (self.value is ValueSource.key or self.value_norm):
            reason = "uses the values of another kind, so value and value_norm must be set there"
            yield Problem("shares", reason, value=self.shares, accepted="null")
        if self.window is not None and self.chunk is not None:
            yield Problem(
                "chunk",
                f"cannot be combined with window={self.window}",
                value=self.chunk,
                accepted="only one of the two",
            )
