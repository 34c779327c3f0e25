"""Fields of task=convert."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.model import Dtype
from maxhydra.config.schema.run import Task


class ConvertFormat(Enum):
    hf = "hf"
    peft = "peft"
    maxhydra = "maxhydra"


@schema
class ConvertTask(Task):
    """Writes the weights of checkpoint.load_parameters in another format."""

    format: ConvertFormat = ConvertFormat.hf
    """hf: a Hugging Face folder with config.json, safetensors and the tokenizer's files, adapters merged; peft: only
    the adapter of a run, in PEFT format; maxhydra: a checkpoint with only the weights, adapters merged, quantized if
    quantization=int8_weights or int4_weights is set."""
    output: str | None = None
    """Output folder, which must not exist yet; it appears when it is complete."""
    dtype: Dtype | None = None
    """hf, maxhydra: dtype of the written weights. null: model.dtypes.weights, or model.dtypes.compute for weights
    that are quantized."""
    model_type: str | None = None
    """Hugging Face model_type to write. null: the first that can represent the model."""

    def check(self) -> Iterator[Problem]:
        if self.output is None:
            yield Problem("output", "is needed", value=None, accepted="a folder that does not exist yet")
        if self.format is ConvertFormat.peft and self.dtype is not None:
            yield Problem("dtype", "is not used by format=peft, which is written in float32", value=self.dtype)
