"""Rotary positions as data."""

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
    """Frequencies: default; proportional (Gemma 4, 2026), by which the whole head turns, what is beyond share by zero;
    linear, llama3 (Llama 3.1), yarn, three ways to stretch them; none for no positions."""
    theta: float = option(10000.0, gt=0)
    """Base of the geometric series of wavelengths."""
    share: float = option(1.0, gt=0, le=1)
    """Share of a head that is turned, from its beginning; the rest knows no positions."""
    pairs: Pairs = Pairs.halves
    """Which two numbers of a head turn together: those at the same place of its halves, or neighbours."""
    factor: float | None = option(None, gt=0)
    """linear, llama3, yarn: how much the longest wavelengths are stretched."""
    low_freq_factor: float | None = option(None, gt=0)
    """llama3: wavelengths over original_context / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float | None = option(None, gt=0)
    """llama3: wavelengths under original_context / high_freq_factor are left as they are."""
    original_context: int | None = option(None, ge=1)
    """llama3, yarn: context length before stretching."""
    beta_fast: float = option(32.0, gt=0)
    """yarn: pairs that turn more often than this over the original context are left as they are."""
    beta_slow: float = option(1.0, gt=0)
    """yarn: pairs that turn less often than this over the original context are stretched by the whole factor."""
    truncate: bool = True
    """yarn: whether the blend between the two begins and ends at whole pairs."""
    attention_factor: float | None = option(None, gt=0)
    """yarn: factor on turned queries and keys. null: 0.1 * ln(factor) + 1."""

    def check(self) -> Iterator[Problem]:
        for field in dataclasses.fields(self):
            kinds, value = _KINDS.get(field.name, ()), getattr(self, field.name)
            if self.kind in kinds and field.name in _NEEDED and value is None:
                reason = f"is needed by kind={self.kind.value}"
                yield Problem(field.name, reason, value=None, accepted="a positive number")
            if kinds and self.kind not in kinds and value != field.default:
                hint = f"set kind={' or '.join(kind.value for kind in kinds)}, or leave it out"
                yield Problem(field.name, f"is not used by kind={self.kind.value}", value=value, hint=hint)
        if self.kind is RopeKind.yarn and self.beta_slow > self.beta_fast:
            accepted = f"at most beta_fast={self.beta_fast}"
            yield Problem("beta_slow", "is faster than beta_fast", value=self.beta_slow, accepted=accepted)


# The kinds that use a field; all use those that are not here.
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
