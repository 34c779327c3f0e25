"""Attention as data: the mixer that looks at earlier tokens by content."""

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
    """Queries grow with their position, which keeps attention sharp over long contexts (Nakanishi, 2025):
    1 + scale * ln(1 + floor((position + 1) / floor))."""

    floor: int | None = option(None, ge=1)
    """Positions over which the factor stays the same. null: queries stay as they are."""
    scale: float | None = option(None, gt=0)
    """How fast the factor grows with the logarithm of the position."""

    def check(self) -> Iterator[Problem]:
        given = {"floor": self.floor, "scale": self.scale}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == 1:
            other = "scale" if missing == ["floor"] else "floor"
            yield Problem(missing[0], f"is needed beside {other}", value=None, accepted="a positive number")


@schema
class Attention(Schema):
    """Grouped-query attention (Ainslie et al., 2023); multi-head and multi-query are its two ends."""

    num_heads: int | None = option(None, ge=1)
    """Query heads of this kind, where they differ from the model's."""
    num_kv_heads: int | None = option(None, ge=1)
    """Key and value heads of this kind, where they differ from the model's."""
    head_dim: int | None = option(None, ge=1)
    """Size of a head of this kind, where it differs from the model's."""
    window: int | None = option(None, ge=1)
    """Sliding window: a token sees itself and the window - 1 tokens before it. null: all before it."""
    chunk: int | None = option(None, ge=1)
    """A sequence is cut into chunks of so many tokens, which do not see each other. null: it is not cut."""
    softcap: float | None = option(None, gt=0)
    """Attention logits become softcap * tanh(logits / softcap)."""
    scale: float | None = option(None, gt=0)
    """Factor on the attention logits. null: 1 / sqrt(head_dim)."""
    sinks: bool = False
    """A learned logit for each query head joins the softmax, so that a head may attend to nothing (gpt-oss, 2025)."""
    qk_norm: QkNorm = QkNorm.none
    """Norm of queries and keys (Henry et al., 2020) before positions: of each head, with a scale or plain, or of whole
    projections."""
    bias: AttentionBias = AttentionBias.none
    """Which projections add a learned vector: none, those to queries, keys and values, or all."""
    gated: bool = False
    """Whether what a head gathers is multiplied by the sigmoid of a projection of the token (Qiu et al., 2025)."""
    value: ValueSource = ValueSource.own
    """What values are made of: a projection of their own, or that of the keys, without their norm and positions."""
    value_norm: bool = False
    """Whether the values of each head are normalised, without a scale."""
    shares: str | None = None
    """Kind of the prefix whose last layer's keys and values are seen in the place of own ones (Brandon et al., 2024).
    null: the layer has its own."""
    temperature: Temperature = section(Temperature)
    rope: Rope = section(Rope)

    def check(self) -> Iterator[Problem]:
        if self.shares is not None and (self.value is ValueSource.key or self.value_norm):
            reason = "takes values as they are: value and value_norm belong to the kind they come from"
            yield Problem("shares", reason, value=self.shares, accepted="null")
        if self.window is not None and self.chunk is not None:
            yield Problem("chunk", f"does not go with window={self.window}", value=self.chunk, accepted="one of them")
