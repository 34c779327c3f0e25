"""Weights of another project, seen the same way whatever file they lie in."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Table


@dataclasses.dataclass(frozen=True)
class Source:
    """Named tensors and what is said of them. Tensors are read one at a time."""

    key: str
    """The config field that names the source, for errors."""
    location: str
    table: Table
    model: config.Model
    """The model that the files state."""
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    is_gguf: bool = False
    silent: tuple[str, ...] = ()
    """Paths below a layer kind of which the files say nothing, so that any value is as good."""
    check: Callable[[config.Model], Iterator[Problem]] = lambda model: iter(())
    """What the files say that has no words in a config: problems of a model that does not agree."""

    def require_exactly(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse files that lack a tensor, hold one of another shape, or one that would be left out."""
        if missing := [name for name in wanted if name not in self.shapes]:
            raise self.problem(f"lacks {_some(missing)}")
        spare = self._tied_heads(wanted)
        unknown = [name for name in self.shapes if name not in wanted and name not in spare]
        ignored = [pattern.format(beyond=self.model.num_layers) for pattern in self.table.ignored]
        if extra := [name for name in unknown if not any(fnmatch(name, pattern) for pattern in ignored)]:
            raise self.problem(f"holds {_some(extra)}, for which the model has no place")
        for name, shape in wanted.items():
            if self.shapes[name] != shape:
                raise self.problem(f"{name} is {list(self.shapes[name])}, where the model has {list(shape)}")
        for head, embedding in spare.items():
            if not np.array_equal(self.read(head), self.read(embedding)):
                raise self.problem(f"holds {head}, which differs from {embedding}, though the two are stated to be one")

    def _tied_heads(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """A head that is stored although it is stated to be the embedding -> the embedding."""
        names = {row.path: row.gguf if self.is_gguf else row.hf for row in self.table.ends}
        head, embedding = names.get("head/kernel", ""), names.get("embedding/table", "")
        is_spare = head in self.shapes and head not in wanted and self.model.head is config.Head.tied
        return {head: embedding} if is_spare and embedding in wanted else {}

    def problem(self, reason: str) -> ConfigError:
        hint = "choose the model that the weights belong to (model=...)"
        return ConfigError(Problem(self.key, reason, value=self.location, hint=hint))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
