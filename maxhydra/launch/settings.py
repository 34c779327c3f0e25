"""Base class and validation helpers for launcher settings: hydra.launcher, and `launcher` in sweep.json."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from maxhydra.config.errors import Problem, did_you_mean

KEY = "hydra.launcher"


@dataclasses.dataclass(frozen=True)
class LauncherSettings:
    """How a launcher starts jobs. Subclasses are frozen dataclasses of JSON-serializable values."""

    kind: ClassVar[str]

    @property
    def detached(self) -> bool:
        """True if the launcher submits jobs and returns without waiting for them."""
        return False

    def problems(self) -> Iterator[Problem]:
        """Yield every invalid value."""
        yield from ()

    def to_json(self) -> dict[str, Any]:
        """Return the form stored in sweep.json."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


def minimum_problems(settings: LauncherSettings, minimums: Mapping[str, int]) -> Iterator[Problem]:
    """Yield fields that are not integers, or below their minimum."""
    for name, minimum in minimums.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            yield Problem(f"{KEY}.{name}", "is out of range", value, f"{minimum} or more")


def choice_problems(settings: LauncherSettings, accepted: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Yield fields whose value is not one of the accepted choices."""
    for name, choices in accepted.items():
        value = getattr(settings, name)
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            yield Problem(f"{KEY}.{name}", "is not a valid choice", value, ", ".join(choices), hint)


def pattern_problems(settings: LauncherSettings, patterns: Mapping[str, tuple[str, str]]) -> Iterator[Problem]:
    """Yield non-null fields that do not match their pattern; `patterns` maps name -> (regex, description)."""
    for name, (pattern, description) in patterns.items():
        value = getattr(settings, name)
        if value is not None and not re.fullmatch(pattern, str(value)):
            yield Problem(f"{KEY}.{name}", "is malformed", value, description)
