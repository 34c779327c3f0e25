"""Name tables: Hugging Face and GGUF names of a family's tensors and settings. tables/ has one module per family.

Example of a family with one tensor per expert, and with gate and up fused in one tensor:

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
        non_layer=(Weight("embedding/table", "model.embed_tokens.weight", transposed=False), ...),
        to_model=to_model,
        to_settings=to_settings,
    )

A row maps one HF tensor to the parameter or parameters of one layer that it holds. Rows whose parameters a layer does
not have are skipped, so a table lists the rows of all layer kinds. Tables contain no sizes; those follow from the
model's parameter shapes. This module does not import jax, because config.json is read before a config is valid.
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
"""Contents of config.json."""


class UnsupportedError(ValueError):
    """A value in config.json that maxhydra does not implement. The message names it and the supported values."""


class Join(Enum):
    """How several parameters are fused along the output axis of one HF tensor."""

    parts = "parts"
    """Concatenated."""
    heads = "heads"
    """Concatenated per head: all parameters of the first head, then all of the second. The number of heads is that of
    the first parameter, or of the one named by `Weight.heads`; a parameter with several heads per group keeps them
    adjacent."""
    interleaved = "interleaved"
    """Alternating elements: first, first, second, second."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A row of the table: one HF tensor and the parameter path, or several if the tensor is fused.

    Paths are relative to the layer or, outside the layers, to the model. Parameters are [*leading, *inputs, *outputs];
    HF tensors are [*leading, outputs, inputs] with inputs and outputs flattened.
    """

    path: str | tuple[str, ...]
    hf: str
    """HF tensor name with a `{layer}` placeholder, and `{expert}` if each expert is a separate tensor (the first axis
    of the parameter is then the expert axis, and the fields below describe one expert)."""
    gguf: str = ""
    inputs: int = 1
    """Number of input dimensions of the parameter, after the leading ones; 0 for a bias. A vector is all inputs or all
    outputs."""
    transposed: bool = True
    """True if the HF tensor is [outputs, inputs] as in torch.nn.Linear; False for an embedding or GPT-2's Conv1D."""
    leading: int = 0
    """Number of leading dimensions shared by parameter and tensor, e.g. 1 if all experts are in one tensor."""
    join: Join = Join.parts
    heads: str = ""
    """With join=heads: the parameter whose first output dimension is the number of heads; default: the first one."""
    has_split_inputs: bool = False
    """True if the HF tensor keeps the input dimensions separate, as a convolution does."""
    singleton_axis: int | tuple[int, ...] | None = None
    """Axis of size 1, or several, that only the HF tensor has, as in a depthwise convolution."""
    requires: str = ""
    """A path that the layer must also have, to tell apart layer kinds with parameters of the same name."""
    excludes: str = ""
    """A path that the layer must not have."""
    interleaved_rope: bool = False
    """True if the HF tensor orders a head's features for RoPE on adjacent pairs; parameters pair the two halves."""
    axial_rope: bool = False
    """True if the HF tensor rotates the first half of a head by the column of a patch and the second by its row;
    parameters pair the two halves of a head, and rotate by the row first."""
    input_order: tuple[int, ...] = ()
    """The input axes of the parameter in the order in which the HF tensor flattens them; (): unchanged."""
    gguf_interleaved_rope: bool = False
    """The same for the GGUF tensor."""
    dtype: str = ""
    """Dtype of the HF tensor if it holds integers; parameters hold them in float32."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def is_by_expert(self) -> bool:
        return "{expert}" in self.hf


# The score head of a sequence classifier with one label, which has the same name in every family.
SCORE = Weight("score/kernel", "score.weight", "cls.output.weight", singleton_axis=0)


@dataclasses.dataclass(frozen=True)
class Gguf:
    """GGUF architectures and settings of a family."""

    architectures: tuple[str, ...]
    """Values of `general.architecture`."""
    settings: Mapping[str, str]
    """Key of config.json -> GGUF key of the same meaning, without the architecture prefix."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Tensor names and settings of one model family."""

    hf_types: Mapping[str, str]
    """`model_type` in config.json -> transformers class. The first entry is the one that is exported."""
    layer: tuple[Weight, ...]
    non_layer: tuple[Weight, ...]
    """Rows outside the layers: embedding, final norm, head."""
    to_model: Callable[[Settings], dict[str, Any]]
    """Converts config.json to the values of our `model` section, as YAML would hold them. Schema defaults may be
    omitted. The result fully determines what the weights mean: a key missing from config.json has the family's
    default, and an unsupported value raises UnsupportedError."""
    to_settings: Callable[[config.Model], Settings | None]
    """Inverse of to_model, without model_type, architectures and dtype. It need not reject models that the family
    cannot represent: the export passes its result through to_model and compares."""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """fnmatch patterns of tensors to skip, such as the vision tower of a multimodal model; {beyond} is replaced by
    num_layers, the index after the last layer."""
    gguf: Gguf | None = None
    vision_layer: tuple[Weight, ...] = ()
    """Rows of the layers of the image encoder."""
    audio_layer: tuple[Weight, ...] = ()
    """Rows of the layers of the audio encoder."""
    speech_layers: Mapping[str, tuple[Weight, ...]] = dataclasses.field(default_factory=dict)
    """Rows of the layers of each decoder of codes, by its section in `model.speech`."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prefix of tensor names in files of some versions of transformers -> the prefix in this table; with a leading dot,
    a part of the name anywhere."""

    def current_name(self, name: str) -> str:
        """The name in this table of a tensor in a file."""
        for old, new in self.renamed.items():
            if name.startswith(old) or (old.startswith(".") and old in name):
                return name.replace(old, new, 1)
        return name

    @property
    def model_type(self) -> str:
        """The `model_type` written on export."""
        return next(iter(self.hf_types))


def all_tables() -> Iterator[Table]:
    """Yield the TABLE, or every table of TABLES, of each module in convert/tables."""
    for info in pkgutil.iter_modules(tables.__path__):
        module = importlib.import_module(f"{tables.__name__}.{info.name}")
        yield from module.TABLES if hasattr(module, "TABLES") else (module.TABLE,)
