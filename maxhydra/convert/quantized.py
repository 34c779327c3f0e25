"""Weights that are published in few bits, as the numbers that they stand for: blocks of float8, and of MXFP4.

A quantized tensor and its scales become one tensor with the name and shape that the family's table knows; nothing else
needs to know.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maxhydra.convert.table import Settings, UnsupportedError

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], np.ndarray]
# float8 with a scale for each block of a matrix (DeepSeek-AI, 2024).
SCALE = "_scale_inv"
BLOCK = (128, 128)
# MXFP4 (Rouhani et al., 2023): 32 numbers of four bits in 16 bytes, and the exponent of the power of two they share.
BLOCKS, SCALES = "_blocks", "_scales"
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FP4 = np.concatenate([FP4, -FP4])
METHODS = ("fp8", "mxfp4")


def restored(shapes: Shapes, read: Read, settings: Settings) -> tuple[Shapes, Read]:
    """Shapes and a reader of the numbers in full; UnsupportedError where they are packed in a way of their own."""
    told: dict[str, Any] = settings.get("quantization_config") or {}
    method = told.get("quant_method")
    if method not in (None, *METHODS):
        raise UnsupportedError(f"quantization_config.quant_method={method}, where {', '.join(METHODS)} are served")
    block = tuple(told.get("weight_block_size") or BLOCK)
    packed = {name.removesuffix(BLOCKS) for name in shapes if name.endswith(BLOCKS)}
    scaled = {name.removesuffix(SCALE) for name in shapes if name.endswith(SCALE)}
    hidden = {name + ending for name in packed for ending in (BLOCKS, SCALES)} | {name + SCALE for name in scaled}
    plain = {name: shape for name, shape in shapes.items() if name not in hidden}
    for name in packed:
        *leading, rows, groups, size = shapes[name + BLOCKS]
        plain[name] = (*leading, groups * size * 2, rows)

    def numbers(name: str) -> np.ndarray:
        if name in packed:
            return from_mxfp4(read(name + BLOCKS), read(name + SCALES))
        return from_float8(read(name), read(name + SCALE), block) if name in scaled else read(name)

    return plain, numbers


def from_float8(weight: np.ndarray, scale: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """A matrix times the scale of each of its blocks; blocks at the edges may be cut."""
    spread = scale.astype(np.float32)
    for axis, size in enumerate(block):
        spread = np.repeat(spread, size, axis=axis)
    return weight.astype(np.float32) * spread[tuple(slice(length) for length in weight.shape)]


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., outputs, groups, 16] bytes and [..., outputs, groups] exponents -> [..., inputs, outputs], float32."""
    pairs = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1)
    exponents = scales.astype(np.int32) - 127
    values = np.ldexp(pairs.reshape(*blocks.shape[:-1], -1), exponents[..., None])
    return np.ascontiguousarray(values.reshape(*blocks.shape[:-2], -1).swapaxes(-1, -2))
