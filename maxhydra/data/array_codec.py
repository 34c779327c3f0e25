"""Arrays as the bytes of one record: what task=tokenize writes into ArrayRecord files, at a microsecond to read.

MAGIC, number of arrays u8, then per array: length of name u8, name, dtype u8, dimensions u8, sizes u32 each, values
"""

import math
import struct
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

MAGIC = b"MXA1"
DTYPES = [np.dtype(name) for name in ("u1", "<u2", "<u4", "<i4", "<i8", "<f2", "<f4")]


def encode_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays by name as bytes."""
    parts = [MAGIC, struct.pack("<B", len(arrays))]
    for name, array in arrays.items():
        letters = name.encode()
        kind = DTYPES.index(array.dtype)
        parts += [struct.pack(f"<B{len(letters)}sBB", len(letters), letters, kind, array.ndim)]
        parts += [struct.pack(f"<{array.ndim}I", *array.shape), np.ascontiguousarray(array).tobytes()]
    return b"".join(parts)


def decode_arrays(record: bytes) -> dict[str, np.ndarray]:
    """The arrays of a record, which must begin with MAGIC. ValueError where it is cut short or not ours."""
    if record[:4] != MAGIC:
        raise ValueError("not a record of arrays")
    arrays = {}
    try:
        count, at = record[4], 5
        for _ in range(count):
            head = record[at : at + 3 + record[at]]
            at += len(head)
            name, dtype, sizes = _head(head)
            shape = sizes.unpack_from(record, at)
            at += sizes.size
            size = shape[0] if len(shape) == 1 else math.prod(shape)
            array = np.frombuffer(record, dtype, size, at)
            arrays[name] = array if len(shape) == 1 else array.reshape(shape)
            at += size * dtype.itemsize
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"a record of arrays that cannot be read: {error}") from None
    return arrays


@lru_cache(maxsize=256)
def _head(head: bytes) -> tuple[str, np.dtype, struct.Struct]:
    """Name, type and how the sizes are written: the same few in every record of a file."""
    return head[1:-2].decode(), DTYPES[head[-2]], struct.Struct(f"<{head[-1]}I")
