"""Attention as data: the mixer that looks at earlier tokens by content, and the positions it sees them at."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem


class RopeKind(Enum):
    none = "none"
    default = "default"
    llama3 = "llama3"


@schema
class Rope(Schema):
    """Rotary position embedding (Su et al., 2021)."""

    kind: RopeKind = RopeKind.default
    """Frequencies: default, llama3 (Llama 3.1's frequency-dependent scaling), or none for no positions."""
    theta: float = option(10000.0, gt=0)
    """Base of the geometric series of wavelengths."""
    factor: float | None = option(None, gt=0)
    """llama3: how much the longest wavelengths are stretched."""
    low_freq_factor: float | None = option(None, gt=0)
    """llama3: wavelengths over original_context / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float | None = option(None, gt=0)
    """llama3: wavelengths under original_context / high_freq_factor are left as they are."""
    original_context: int | None = option(None, ge=1)
    """llama3: context length before stretching."""

    def check(self) -> Iterator[Problem]:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_context"):
            value = getattr(self, name)
            if self.kind is RopeKind.llama3 and value is None:
                yield Problem(name, "is needed by kind=llama3", value=None, accepted="a positive number")
            if self.kind is not RopeKind.llama3 and value is not None:
                yield Problem(
                    name, f"is not used by kind={self.kind.value}", value=value, hint="set kind=llama3 or leave it null"
                )


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
    softcap: float | None = option(None, gt=0)
    """Attention logits become softcap * tanh(logits / softcap)."""
    scale: float | None = option(None, gt=0)
    """Factor on the attention logits. null: 1 / sqrt(head_dim)."""
    rope: Rope = section(Rope)
