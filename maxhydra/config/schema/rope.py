"""Schema of rotary position embeddings."""

import dataclasses
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem


class RopeKind(Enum):
    none = "none"
    default = "default"
    proportional = "proportional"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


class Pairs(Enum):
    halves = "halves"
    neighbours = "neighbours"


@schema
class Rope(Schema):
    """Rotary position embedding (Su et al., 2021)."""

    kind: RopeKind = RopeKind.default
    """Frequencies: default; proportional (Gemma 4, 2026), over the whole head with frequency zero beyond share; linear,
    llama3 (Llama 3.1) and yarn, which extend the context length; none for no position embedding."""
    theta: float = option(10000.0, gt=0)
    """Base of the geometric series of wavelengths."""
    share: float = option(1.0, gt=0, le=1)
    """Fraction of the head dimensions that is rotated, from the first on; the rest has no position information."""
    pairs: Pairs = Pairs.halves
    """Dimensions that are rotated together: i and i + dim/2 (halves), or 2i and 2i + 1 (neighbours)."""
    factor: float | None = option(None, gt=0)
    """linear, llama3, yarn: scaling factor of the longest wavelengths."""
    low_freq_factor: float | None = option(None, gt=0)
    """llama3: wavelengths above original_context / low_freq_factor are scaled by the full factor."""
    high_freq_factor: float | None = option(None, gt=0)
    """llama3: wavelengths below original_context / high_freq_factor are not scaled."""
    original_context: int | None = option(None, ge=1)
    """llama3, yarn: context length before extension."""
    beta_fast: float = option(32.0, gt=0)
    """yarn: pairs with more rotations than this over the original context are not scaled."""
    beta_slow: float = option(1.0, gt=0)
    """yarn: pairs with fewer rotations than this over the original context are scaled by the full factor."""
    truncate: bool = True
    """yarn: round the bounds of the interpolation range to whole pairs."""
    attention_factor: float | None = option(None, gt=0)
    """yarn: factor on rotated queries and keys. null: 0.1 * ln(factor) + 1."""

    def check(self) -> Iterator[Problem]:
        for field in dataclasses.fields(self):
            kinds, value = _KINDS.get(field.name, ()), getattr(self, field.name)
            if self.kind in kinds and field.name in _NEEDED and value is None:
                reason = f"is needed by kind={self.kind.value}"
                yield Problem(field.name, reason, value=None, accepted="a positive number")
            if kinds and self.kind not in kinds and value != field.default:
                hint = f"set kind={' or '.join(kind.value for kind in kinds)}, or leave this at its default"
                yield Problem(field.name, f"is not used by kind={self.kind.value}", value=value, hint=hint)
        if self.kind is RopeKind.yarn and self.beta_slow > self.beta_fast:
            accepted = f"at most beta_fast={self.beta_fast}"
            yield Problem("beta_slow", "is larger than beta_fast", value=self.beta_slow, accepted=accepted)


# Kinds that use a field; fields not listed are used by all kinds.
_LLAMA3, _YARN = (RopeKind.llama3,), (RopeKind.yarn,)
_KINDS = {
    "factor": (RopeKind.linear, RopeKind.llama3, RopeKind.yarn),
    "low_freq_factor": _LLAMA3,
    "high_freq_factor": _LLAMA3,
    "original_context": (RopeKind.llama3, RopeKind.yarn),
    "beta_fast": _YARN,
    "beta_slow": _YARN,
    "truncate": _YARN,
    "attention_factor": _YARN,
}
_NEEDED = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
