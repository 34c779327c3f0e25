"""How other projects write a family: its settings and the names of its weights. tables/ has one module per family.

A table in full, of a family whose experts are separate tensors, and whose gate and up lie in one:

    LAYER = "model.layers.{layer}."
    TABLE = Table(
        hf_types={"mine": "MineForCausalLM"},
        layer=(
            Weight("attention_norm/scale", LAYER + "input_layernorm.weight"),
            Weight("attention/query/kernel", LAYER + "self_attn.q_proj.weight"),
            Weight("attention/query/bias", LAYER + "self_attn.q_proj.bias", inputs=0),
            Weight("attention/out/kernel", LAYER + "self_attn.o_proj.weight", inputs=2),
            Weight("mlp/experts/down/kernel", LAYER + "mlp.experts.{expert}.down_proj.weight"),
            Weight(
                ("mlp/shared/gate/kernel", "mlp/shared/up/kernel"), LAYER + "mlp.shared.gate_up_proj.weight",
                join=Join.interleaved,
            ),
            ...
        ),
        ends=(Weight("embedding/table", "model.embed_tokens.weight", turned=False), ...),
        to_model=to_model,
        to_settings=to_settings,
    )

A row is one tensor of theirs and the array or arrays of ours that it holds, each of one layer. A row whose arrays a
layer does not have is passed over, so a table lists what any kind of layer may have. Sizes never stand in a table: they
follow from the model's own shapes. Nothing here imports jax: settings are read before a config is valid.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert import tables

Settings = dict[str, Any]
"""What config.json holds."""


class UnsupportedError(ValueError):
    """A setting of theirs for which there is no mechanism here. The text names the setting and what is served."""


class Join(Enum):
    """How arrays of ours share the outputs of one tensor of theirs."""

    parts = "parts"
    """One after the other."""
    heads = "heads"
    """Head by head: all parts of the first head, then all of the second. The heads are those of the first array, or of
    the one that `Weight.heads` names; an array with several heads to each of these has them side by side."""
    interleaved = "interleaved"
    """Number by number: first, first, second, second."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of theirs, and our path below the layer or the model; several where it holds several arrays.

    Our arrays are [*leading, *inputs, *outputs]; theirs is [*leading, outputs, inputs], both flat.
    """

    path: str | tuple[str, ...]
    hf: str
    """Their name: `{layer}` where layers have a number, `{expert}` where each expert is a tensor of its own (then our
    first axis counts the experts, and what stands below is of one)."""
    gguf: str = ""
    inputs: int = 1
    """Our dimensions that are inputs, after the leading ones; 0 for a bias. A vector is all inputs or all outputs."""
    turned: bool = True
    """Whether theirs has outputs before inputs, as torch's Linear; an embedding, or a Conv1D of GPT-2, has not."""
    leading: int = 0
    """Our first dimensions that theirs has too, such as experts that lie in one tensor."""
    join: Join = Join.parts
    heads: str = ""
    """join=heads: the array whose first output dimension counts the heads, where it is not the first of this row."""
    single_axis: int | None = None
    """Where theirs has an axis of size 1 that ours has not, as a depthwise convolution's."""
    beside: str = ""
    """A path that the layer must have too, where layers of other kinds have arrays of the same names."""
    neighbours: bool = False
    """Theirs turns neighbours by rotary positions, where we turn halves of a head, and orders a head's numbers so."""
    gguf_neighbours: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def is_by_expert(self) -> bool:
        return "{expert}" in self.hf


@dataclasses.dataclass(frozen=True)
class Gguf:
    """A family in GGUF files."""

    architectures: tuple[str, ...]
    """`general.architecture`."""
    settings: Mapping[str, str]
    """Key of config.json -> the file's value of the same meaning, below the architecture's name."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A family as others write it."""

    hf_types: Mapping[str, str]
    """`model_type` in config.json -> the class of transformers. The first is what is written."""
    layer: tuple[Weight, ...]
    ends: tuple[Weight, ...]
    to_model: Callable[[Settings], dict[str, Any]]
    """config.json -> our model config: plain values, as YAML would hold them; what equals the schema's default may be
    left out. It is the whole truth about what the weights mean. A key that is not there has the family's default; a
    setting that no mechanism serves is an UnsupportedError."""
    to_settings: Callable[[config.Model], Settings | None]
    """The other way round, model_type, architectures and dtype aside. It need not refuse a model that the family
    cannot tell: what it gives is read back through to_model, and must mean the same."""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns (fnmatch) of tensors that hold nothing of this model, such as the vision part of a larger one; {beyond}
    is the number of the first layer behind the last."""
    gguf: Gguf | None = None

    @property
    def written_type(self) -> str:
        return next(iter(self.hf_types))


def all_tables() -> Iterator[Table]:
    """Every table of the package, found by its file."""
    for module in pkgutil.iter_modules(tables.__path__):
        yield importlib.import_module(f"{tables.__name__}.{module.name}").TABLE
