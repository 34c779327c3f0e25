"""Common interface to external checkpoints, whatever their file format."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Table


@dataclasses.dataclass(frozen=True)
class Source:
    """An external checkpoint: named tensors, read one at a time, and the model they belong to."""

    key: str
    """The config field that names the source, for errors."""
    location: str
    table: Table
    model: config.Model
    """The model that the files describe."""
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    is_gguf: bool = False
    unspecified: tuple[str, ...] = ()
    """Paths below a layer kind that the files do not specify, so any value is accepted."""
    check: Callable[[config.Model], Iterator[Problem]] = lambda model: iter(())
    """Check for properties of the files that a config does not express; yields the problems of a model."""

    def require_exactly(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError if a tensor is missing, unexpected, or has the wrong shape."""
        if missing := [name for name in expected if name not in self.shapes]:
            raise self.problem(f"is missing {_abbreviate(missing)}")
        duplicate_heads = self._stored_tied_heads(expected)
        unknown = [name for name in self.shapes if name not in expected and name not in duplicate_heads]
        ignored = [pattern.format(beyond=self.model.num_layers) for pattern in self.table.ignored]
        if extra := [name for name in unknown if not any(fnmatch(name, pattern) for pattern in ignored)]:
            raise self.problem(f"contains {_abbreviate(extra)}, which the model has no parameter for")
        for name, shape in expected.items():
            if self.shapes[name] != shape:
                raise self.problem(f"{name} has shape {list(self.shapes[name])}, but the model expects {list(shape)}")
        for head, embedding in duplicate_heads.items():
            if not np.array_equal(self.read(head), self.read(embedding)):
                raise self.problem(f"contains {head}, which differs from {embedding} although the two are tied")

    def _stored_tied_heads(self, expected: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Head tensor stored in the files although it is tied -> the embedding it must equal."""
        names = {row.path: row.gguf if self.is_gguf else row.hf for row in self.table.non_layer}
        head, embedding = names.get("head/kernel", ""), names.get("embedding/table", "")
        is_duplicate = head in self.shapes and head not in expected and self.model.head is config.Head.tied
        return {head: embedding} if is_duplicate and embedding in expected else {}

    def problem(self, reason: str) -> ConfigError:
        hint = "choose the model that the weights belong to (model=...)"
        return ConfigError(Problem(self.key, reason, value=self.location, hint=hint))


def _abbreviate(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
