"""Binary format of a dict of arrays in one record, as task=tokenize writes it; decoding takes a microsecond.

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
    """Encode arrays by name."""
    parts = [MAGIC, struct.pack("<B", len(arrays))]
    for name, array in arrays.items():
        name_bytes = name.encode()
        dtype_code = DTYPES.index(array.dtype)
        parts += [struct.pack(f"<B{len(name_bytes)}sBB", len(name_bytes), name_bytes, dtype_code, array.ndim)]
        parts += [struct.pack(f"<{array.ndim}I", *array.shape), np.ascontiguousarray(array).tobytes()]
    return b"".join(parts)


def decode_arrays(record: bytes) -> dict[str, np.ndarray]:
    """Decode a record that starts with MAGIC; ValueError if it is truncated or in another format."""
    if record[:4] != MAGIC:
        raise ValueError("not in the array format of task=tokenize")
    arrays = {}
    try:
        count, at = record[4], 5
        for _ in range(count):
            header = record[at : at + 3 + record[at]]
            at += len(header)
            name, dtype, sizes = _parse_header(header)
            shape = sizes.unpack_from(record, at)
            at += sizes.size
            size = shape[0] if len(shape) == 1 else math.prod(shape)
            array = np.frombuffer(record, dtype, size, at)
            arrays[name] = array if len(shape) == 1 else array.reshape(shape)
            at += size * dtype.itemsize
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"damaged array record: {error}") from None
    return arrays


@lru_cache(maxsize=256)
def _parse_header(header: bytes) -> tuple[str, np.dtype, struct.Struct]:
    """Name, dtype and size layout of an array; cached, since all records of a file share a few headers."""
    return header[1:-2].decode(), DTYPES[header[-2]], struct.Struct(f"<{header[-1]}I")
