"""How other projects name the weights of a family, as a plain table; tables/ has one module per table."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping

from maxhydra.convert import tables


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight: our path below the layer or the model, and the names of others, `{layer}` where layers have a number.

    Others keep a matrix as [outputs, inputs]; ours is [*inputs, *outputs].
    """

    path: str
    hf: str
    gguf: str
    inputs: int = 1
    """Our leading dimensions that are inputs; 0 where both sides keep the same array, as for an embedding."""
    gguf_is_interleaved: bool = False
    """llama.cpp turns neighbours by rotary positions where we turn halves, and orders the rows of a head to suit."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A family as others write it."""

    hf_types: tuple[str, ...]
    """`model_type` in config.json."""
    gguf_architectures: tuple[str, ...]
    """`general.architecture` in a GGUF file."""
    layer: tuple[Weight, ...]
    ends: tuple[Weight, ...]
    hf_facts: Mapping[str, str]
    """Our setting (facts.py) -> key of config.json."""
    gguf_facts: Mapping[str, str]
    """Our setting -> value of a GGUF file, below the architecture's name."""
    ignored: tuple[str, ...]
    """Patterns (fnmatch) of tensors that hold nothing learned."""
    hf_classes: Mapping[str, str]
    """`model_type` -> the class of transformers, for those that can be written."""
    hf_blind: Mapping[str, tuple[str, ...]]
    """`model_type` -> settings that its class does not know, and that a model must not have to be written as such."""

    def weight(self, path: str, *, is_layer: bool) -> Weight | None:
        rows = self.layer if is_layer else self.ends
        return next((row for row in rows if row.path == path), None)


def all_tables() -> Iterator[Table]:
    """Every table of the package, found by its file."""
    for module in pkgutil.iter_modules(tables.__path__):
        yield importlib.import_module(f"{tables.__name__}.{module.name}").TABLE
