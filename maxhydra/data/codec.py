"""Arrays as the bytes of one record: what task=tokenize writes into ArrayRecord files, at a microsecond to read.

    MAGIC, number of arrays u8, then per array: length of name u8, name, dtype u8, dimensions u8, sizes u32 each, values
"""

import math
import struct
from collections.abc import Mapping

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
            length = record[at]
            name = record[at + 1 : at + 1 + length].decode()
            at += 1 + length
            kind, dimensions = record[at], record[at + 1]
            shape = struct.unpack_from(f"<{dimensions}I", record, at + 2)
            at += 2 + 4 * dimensions
            size = math.prod(shape)
            arrays[name] = np.frombuffer(record, DTYPES[kind], size, at).reshape(shape)
            at += size * DTYPES[kind].itemsize
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"a record of arrays that cannot be read: {error}") from None
    return arrays
