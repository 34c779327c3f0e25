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
    """hf: a Hugging Face folder with config.json, safetensors and the tokenizer's files, adapters merged; peft: the
    adapter of a run alone, as PEFT loads it; maxhydra: a checkpoint of ours with the weights alone, adapters merged, in
    the format of quantization=int8_weights or int4_weights where one is given."""
    output: str | None = None
    """Folder to write, which must not be there yet; it appears when it is complete."""
    dtype: Dtype | None = None
    """hf, maxhydra: number format of the weights in the folder. null: that of model.dtypes.weights, or, of weights that
    are then rounded to fewer bits, that of model.dtypes.compute."""
    model_type: str | None = None
    """Family as which the model is written, by Hugging Face's name. null: the first that can tell it."""

    def check(self) -> Iterator[Problem]:
        if self.output is None:
            yield Problem("output", "is needed", value=None, accepted="a folder that is not there yet")
        if self.format is ConvertFormat.peft and self.dtype is not None:
            yield Problem("dtype", "is not used by format=peft, which is written in float32", value=self.dtype)
