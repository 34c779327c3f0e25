"""What the settings of every place have in common: hydra.launcher, and `launcher` in sweep.json."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from maxhydra.config.errors import Problem, did_you_mean

KEY = "hydra.launcher"


@dataclasses.dataclass(frozen=True)
class LauncherSettings:
    """How jobs are started at a place. Subclasses are frozen dataclasses of plain values, which JSON can hold."""

    kind: ClassVar[str]

    @property
    def detached(self) -> bool:
        """Whether whoever starts jobs does not wait for them."""
        return False

    def problems(self) -> Iterator[Problem]:
        """All that is wrong with the values."""
        yield from ()

    def told(self) -> dict[str, Any]:
        """As sweep.json keeps it."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


def out_of_range(settings: LauncherSettings, least: Mapping[str, int]) -> Iterator[Problem]:
    """Numbers that are none, or too small."""
    for name, lowest in least.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            yield Problem(f"{KEY}.{name}", "is out of range", value, f"{lowest} or more")


def not_offered(settings: LauncherSettings, accepted: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Choices that do not exist."""
    for name, choices in accepted.items():
        value = getattr(settings, name)
        if value not in choices:
            yield Problem(f"{KEY}.{name}", "no such one", value, ", ".join(choices), did_you_mean(str(value), choices))


def unlike(settings: LauncherSettings, patterns: Mapping[str, tuple[str, str]]) -> Iterator[Problem]:
    """Texts that are given and do not have the form that is needed: name -> (pattern, the same in words)."""
    for name, (pattern, words) in patterns.items():
        value = getattr(settings, name)
        if value is not None and not re.fullmatch(pattern, str(value)):
            yield Problem(f"{KEY}.{name}", "cannot be read", value, words)
