"""Decode the bytes of one record: arrays of task=tokenize, a JSON object, or a tf.train.Example.

Arrays, as task=tokenize writes them; decoding takes a microsecond: MAGIC, number of arrays u8, then per array: length
of name u8, name, dtype u8, dimensions u8, sizes u32 each, values.

tf.train.Example, parsed without TensorFlow from the wire format of its four messages:

    Example { Features features = 1 }    Features { map<string, Feature> feature = 1 }
    Feature { BytesList = 1 | FloatList = 2 | Int64List = 3 }, each a list of `value = 1`, packed or not
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from maxhydra.data.records import Record

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3


def parse_example(payload: bytes) -> Record:
    """Parse features by name; ValueError if the bytes are not an Example.

    A bytes list of one value is returned as that value, since text is stored so; numbers are always arrays.
    """
    try:
        record: Record = {}
        for field, features in _fields(payload):
            if field == 1:
                for inner, entry in _fields(_message(features)):
                    if inner == 1:
                        name, feature = _entry(_message(entry))
                        record[name] = feature
    except (IndexError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"not a tf.train.Example: {error}") from None
    if not record:
        raise ValueError("not a tf.train.Example: it has no features")
    return record


def _entry(payload: bytes) -> tuple[str, object]:
    """Parse one map entry: the name and the feature. A missing key or value is empty."""
    name, feature = "", b""
    for field, value in _fields(payload):
        if field == 1:
            name = _message(value).decode()
        elif field == 2:
            feature = _message(value)
    parsed: object = []
    for field, values in _fields(feature):
        if field == BYTES_LIST:
            items = [_message(value) for number, value in _fields(_message(values)) if number == 1]
            parsed = items[0] if len(items) == 1 else items
        elif field == FLOAT_LIST:
            parsed = _floats(_message(values))
        elif field == INT64_LIST:
            parsed = _integers(_message(values))
    return name, parsed


def _floats(payload: bytes) -> np.ndarray:
    """Parse float values: packed, or single ones, which are four bytes each too."""
    parts = [value for field, value in _fields(payload) if field == 1 and isinstance(value, bytes)]
    joined = b"".join(parts)
    if len(joined) % 4:
        raise ValueError("not a tf.train.Example: truncated list of floats")
    return np.frombuffer(joined, "<f4")


def _integers(payload: bytes) -> np.ndarray:
    parts = [value for field, value in _fields(payload) if field == 1]
    packed = [_varints(part) if isinstance(part, bytes) else np.array([part], np.uint64) for part in parts]
    joined = packed[0] if len(packed) == 1 else np.concatenate([np.empty(0, np.uint64), *packed])
    return joined.view(np.int64)


def _varints(payload: bytes) -> np.ndarray:
    """Decode consecutive varints at once: 7 bits per byte, lowest first, the last byte below 128."""
    octets = np.frombuffer(payload, np.uint8)
    last = np.flatnonzero(octets < 0x80)
    if len(last) == len(octets):
        return octets.astype(np.uint64)
    if not len(last) or last[-1] != len(octets) - 1:
        raise ValueError("not a tf.train.Example: truncated list of integers")
    first = np.empty_like(last)
    first[0], first[1:] = 0, last[:-1] + 1
    sizes = last - first + 1
    longest = int(sizes.max())
    if longest > 10:
        raise ValueError("not a tf.train.Example: integer of more than 64 bits")
    values = (octets[first] & 0x7F).astype(np.uint64)
    for byte in range(1, longest):
        longer = np.flatnonzero(sizes > byte)
        bits = (octets[first[longer] + byte] & 0x7F).astype(np.uint64)
        values[longer] |= bits << np.uint64(7 * byte)
    return values


def _message(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError("not a tf.train.Example: expected a message, found a number")
    return value


def _fields(payload: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Iterate over field numbers and values of a message: an int for a varint, else bytes."""
    at, end = 0, len(payload)
    while at < end:
        tag, at = _varint(payload, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(payload, at)
            yield tag >> 3, value
            continue
        if kind == LENGTH:
            size, at = _varint(payload, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"not a tf.train.Example: wire type {kind}")
        if at + size > end:
            raise ValueError("not a tf.train.Example: truncated")
        yield tag >> 3, payload[at : at + size]
        at += size


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        octet = payload[at]
        at += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not a tf.train.Example: integer of more than 64 bits")


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
    except (IndexError, OverflowError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"damaged array record: {error}") from None
    return arrays


@lru_cache(maxsize=256)
def _parse_header(header: bytes) -> tuple[str, np.dtype, struct.Struct]:
    """Name, dtype and size layout of an array; cached, since all records of a file share a few headers."""
    return header[1:-2].decode(), DTYPES[header[-2]], struct.Struct(f"<{header[-1]}I")


def decode(payload: bytes) -> Record:
    """Decode a record by its first bytes; ValueError says why it cannot be decoded.

    No Example starts with `{` or with MAGIC, whose first bytes are not a field of it.
    """
    if payload[:4] == MAGIC:
        return dict(decode_arrays(payload))
    if payload[:1] == b"{":
        return decode_json(payload)
    return parse_example(payload)


def decode_json(payload: bytes) -> Record:
    """Decode a JSON object."""
    try:
        value: Any = json.loads(str(payload, "utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not valid UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("is not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value
