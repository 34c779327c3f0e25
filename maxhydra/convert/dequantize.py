"""Weights that files keep in four or eight bits, with scales beside them, as plain ones.

MXFP4 (Open Compute Project, 2023): `x_blocks` [..., O, I / 32, 16] bytes with two numbers each, the lower half first,
and `x_scales` [..., O, I / 32] powers of two; x is [..., I, O], as gpt-oss has it. Float8 (DeepSeek-V3, 2024): `x`
[O, I], and `x_scale_inv` with a factor for each of its tiles.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from maxhydra.convert.name_table import Settings, UnsupportedError

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], np.ndarray]
BLOCKS, SCALES, TILE_SCALES = "_blocks", "_scales", "_scale_inv"
# The numbers of four bits: a sign, two bits of exponent, one of fraction.
FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
EXPONENT_BIAS = 127
# The name of its number format in safetensors.
FLOAT8 = "F8_E4M3"
# Sides of a tile where the settings do not state them.
TILE = (128, 128)
METHODS = (None, "fp8", "mxfp4")


def unpacked(settings: Settings, shapes: Shapes, read: Read) -> tuple[Shapes, Read]:
    """The tensors as if no file had packed any: shapes by name, and how one is read; UnsupportedError where they are
    packed in a way of their own."""
    told = settings.get("quantization_config") or {}
    if (method := told.get("quant_method")) not in METHODS:
        served = ", ".join(name for name in METHODS if name)
        raise UnsupportedError(f"quantization_config.quant_method={method}, where {served} are served")
    tile = tuple(told.get("weight_block_size") or TILE)
    plain: dict[str, tuple[int, ...]] = {}
    ways: dict[str, Read] = {}
    for name, shape in shapes.items():
        whole = name.removesuffix(BLOCKS)
        if whole != name and whole + SCALES in shapes:
            *leading, outputs, groups, half = shape
            plain[whole] = (*leading, 2 * half * groups, outputs)
            ways[whole] = lambda name: _from_four_bits(read(name + BLOCKS), read(name + SCALES))
        elif name + TILE_SCALES in shapes:
            plain[name] = shape
            ways[name] = lambda name: _from_tiles(read(name), read(name + TILE_SCALES), tile)
        elif not _is_scale(name, shapes):
            plain[name], ways[name] = shape, read
    return plain, lambda name: ways[name](name)


def read_float8(file: Path, name: str) -> np.ndarray:
    """A tensor of a safetensors file in a format that NumPy, and so safetensors with it, does not know."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
        told = json.loads(opened.read(header))[name]
        first, last = told["data_offsets"]
        opened.seek(8 + header + first)
        return np.frombuffer(opened.read(last - first), ml_dtypes.float8_e4m3fn).reshape(told["shape"])


def _is_scale(name: str, shapes: Shapes) -> bool:
    """Whether a tensor is of use only beside another."""
    return (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in shapes) or (
        name.endswith(TILE_SCALES) and name.removesuffix(TILE_SCALES) in shapes
    )


def _from_four_bits(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    numbers = np.stack([FOUR_BITS[blocks & 0x0F], FOUR_BITS[blocks >> 4]], axis=-1)
    numbers = numbers.reshape(*scales.shape, -1)
    scaled = np.ldexp(numbers, scales.astype(np.int32)[..., None] - EXPONENT_BIAS)
    return scaled.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)


def _from_tiles(weight: np.ndarray, scales: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    rows, columns = weight.shape
    factors = np.repeat(np.repeat(scales.astype(np.float32), tile[0], axis=0), tile[1], axis=1)
    return weight.astype(np.float32) * factors[:rows, :columns]
