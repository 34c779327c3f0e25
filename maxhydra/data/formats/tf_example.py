"""Parser of tf.train.Example without TensorFlow: the wire format of its four messages.

Example { Features features = 1 }    Features { map<string, Feature> feature = 1 }
Feature { BytesList = 1 | FloatList = 2 | Int64List = 3 }, each a list of `value = 1`, packed or not
"""

from collections.abc import Iterator

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
