"""Weights of another project, seen the same way whatever file they lie in."""

import dataclasses
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.table import Table, Weight


@dataclasses.dataclass(frozen=True)
class Source:
    """Named tensors and what is said of them. Tensors are read one at a time."""

    key: str
    """The config field that names the source, for errors."""
    location: str
    table: Table
    facts: Mapping[str, Any]
    """Settings that the model must share, by the names of facts.py; one that the files do not state is not there."""
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    is_gguf: bool

    def name(self, weight: Weight, layer: int | None) -> str:
        """What the files call a weight of a layer."""
        return (weight.gguf if self.is_gguf else weight.hf).format(layer=layer)

    def require_exactly(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse files that lack a tensor, hold one of another shape, or one that would be left out."""
        is_tied = self.facts.get("head") == "tied"
        spare = [self.name(row, None) for row in self.table.ends if is_tied and row.path == "head/kernel"]
        ignored = (*self.table.ignored, *spare)
        extra = [n for n in self.shapes if n not in wanted and not any(fnmatch(n, pattern) for pattern in ignored)]
        if missing := [name for name in wanted if name not in self.shapes]:
            raise self.problem(f"lacks {_some(missing)}")
        if extra:
            raise self.problem(f"holds {_some(extra)}, for which the model has no place")
        for name, shape in wanted.items():
            if self.shapes[name] != shape:
                raise self.problem(f"{name} is {list(self.shapes[name])}, where the model has {list(shape)}")

    def problem(self, reason: str) -> ConfigError:
        hint = "choose the model that the weights belong to (model=...)"
        return ConfigError(Problem(self.key, reason, value=self.location, hint=hint))


def no_table(key: str, location: str, what: str, known: list[str]) -> ConfigError:
    """A family without a table."""
    hint = "a family is a table in maxhydra/convert/tables"
    return ConfigError(Problem(key, f"is a {what}", value=location, accepted=", ".join(sorted(known)), hint=hint))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
