"""Hugging Face folders with quantized weights in the format compressed-tensors, which transformers and vLLM load.

Kernels of the layers are stored as 8-bit codes [outputs, inputs] with a float32 scale per output channel; embedding,
head, norms and biases keep their dtype. Activations are not quantized.
"""

import functools
from typing import Any

import ml_dtypes
import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.inference import ConvertFormat
from maxhydra.convert.hf_write import StoredTensor
from maxhydra.convert.name_table import Weight
from maxhydra.model import ModelDef

METHOD, SCALE = "compressed-tensors", "_scale"
# Format -> its name in quantization_config, number type, dtype and largest value of a code.
FORMATS: dict[ConvertFormat, tuple[str, str, np.dtype, float]] = {
    ConvertFormat.hf_fp8: ("float-quantized", "float", np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
    ConvertFormat.hf_int8: ("int-quantized", "int", np.dtype(np.int8), 127.0),
}


def check_dense(model: ModelDef, key: str) -> None:
    """Raise ConfigError for a mixture of experts, whose fused weights are not modules that the format can name."""
    if model.config.has_experts:
        raise ConfigError(Problem(key, "is not supported for a mixture of experts", accepted="hf, peft, maxhydra"))


def compression_settings(format: ConvertFormat) -> dict[str, Any]:
    """The quantization_config of config.json."""
    name, kind, _, _ = FORMATS[format]
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def compress(format: ConvertFormat, row: Weight, tensor: StoredTensor) -> list[StoredTensor]:
    """A kernel as codes and scales; other tensors unchanged."""
    if "{layer}" not in row.hf or not row.paths[0].endswith("/kernel") or len(tensor.shape) != 2:
        return [tensor]
    _, _, dtype, largest = FORMATS[format]

    # The two parts are written one after the other.
    @functools.lru_cache(maxsize=1)
    def parts() -> tuple[np.ndarray, np.ndarray]:
        return quantize_channels(tensor.read(), dtype, largest)

    def codes() -> np.ndarray:
        return parts()[0]

    def scales() -> np.ndarray:
        found = parts()[1]
        parts.cache_clear()
        return found

    outputs = tensor.shape[0]
    return [
        StoredTensor(tensor.name, tensor.shape, dtype, codes),
        StoredTensor(tensor.name + SCALE, (outputs, 1), np.dtype(np.float32), scales),
    ]


def quantize_channels(weight: np.ndarray, dtype: np.dtype, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales [outputs, 1] of a weight [outputs, inputs]; the largest value of a row has the largest code."""
    exact = weight.astype(np.float32)
    scales = np.maximum(np.abs(exact).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / largest
    scaled = exact / scales
    codes = np.rint(scaled) if dtype == np.int8 else np.clip(scaled, -largest, largest)
    return codes.astype(dtype), scales
