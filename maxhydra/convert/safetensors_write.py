"""A safetensors file written tensor by tensor: its own library wants all of them in memory at once.

The format: eight bytes with the length of a JSON header, the header with type, shape and place of each tensor, then
the numbers of all, one after the other.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[np.ndarray], *, dtype: np.dtype
) -> None:
    """`tensors` come in the order of `shapes`, and are asked for one at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype.name], "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for shape, tensor in zip(shapes.values(), tensors, strict=True):
            assert tensor.shape == shape and tensor.dtype == dtype
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
